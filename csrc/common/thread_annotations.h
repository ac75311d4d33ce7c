// What clang's thread-safety analysis is told: which lock, or which ownership, guards a field.
//
//   Mutex mutex_;
//   std::vector<int> inbox_ SMDDP_GUARDED_BY(mutex_);   // touched only while mutex_ is held
//   void drain() SMDDP_REQUIRES(mutex_);                // called only while mutex_ is held
//
// `make tidy` fails where code does not keep to it; other compilers see nothing. The analysis looks at one function at a
// time, and a lambda is a function of its own: a lambda that touches guarded fields takes the lock itself, or begins
// with assertOwned() (ownership.h). It does not look into constructors and destructors.
#pragma once

#if defined(__clang__)
#define SMDDP_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define SMDDP_THREAD_ANNOTATION(x)
#endif

// On a class: something that a thread holds or does not hold.
#define SMDDP_CAPABILITY(name) SMDDP_THREAD_ANNOTATION(capability(name))
// On a class: its objects hold a capability from their constructor to their destructor.
#define SMDDP_SCOPED_CAPABILITY SMDDP_THREAD_ANNOTATION(scoped_lockable)
// On a field: touched only by who holds it. On a pointer, PT: the same for what it points to.
#define SMDDP_GUARDED_BY(x) SMDDP_THREAD_ANNOTATION(guarded_by(x))
#define SMDDP_PT_GUARDED_BY(x) SMDDP_THREAD_ANNOTATION(pt_guarded_by(x))
// On a function: its caller holds it, or must not hold it.
#define SMDDP_REQUIRES(...) SMDDP_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define SMDDP_EXCLUDES(...) SMDDP_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
// On a function: it takes it, takes it if it returns `...`, or lets go of it.
#define SMDDP_ACQUIRE(...) SMDDP_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define SMDDP_TRY_ACQUIRE(...) SMDDP_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define SMDDP_RELEASE(...) SMDDP_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
// On a function: whoever returns from it holds it.
#define SMDDP_ASSERT_CAPABILITY(x) SMDDP_THREAD_ANNOTATION(assert_capability(x))
// On a function: what it returns is this capability.
#define SMDDP_RETURN_CAPABILITY(x) SMDDP_THREAD_ANNOTATION(lock_returned(x))
// On a function that the analysis cannot follow; a comment says why it is right.
#define SMDDP_NO_THREAD_ANALYSIS SMDDP_THREAD_ANNOTATION(no_thread_safety_analysis)
