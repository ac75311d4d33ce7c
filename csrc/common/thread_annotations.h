// Annotations for clang's thread-safety analysis. They say which lock, or which ownership, guards a field.
//
//   Mutex mutex_;
//   std::vector<int> inbox_ SMDDP_GUARDED_BY(mutex_);   // touched only while mutex_ is held
//   void drain() SMDDP_REQUIRES(mutex_);                // called only while mutex_ is held
//
// `make tidy` fails if code breaks these rules; other compilers ignore them. The analysis looks at one function at a
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
// On a field: only a thread that holds it may touch the field. PT, on a pointer: the same for the object.
#define SMDDP_GUARDED_BY(x) SMDDP_THREAD_ANNOTATION(guarded_by(x))
#define SMDDP_PT_GUARDED_BY(x) SMDDP_THREAD_ANNOTATION(pt_guarded_by(x))
// On a function: its caller holds it, or must not hold it.
#define SMDDP_REQUIRES(...) SMDDP_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define SMDDP_EXCLUDES(...) SMDDP_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
// On a function: it acquires it, acquires it if it returns this value, or releases it.
#define SMDDP_ACQUIRE(...) SMDDP_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define SMDDP_TRY_ACQUIRE(...) SMDDP_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define SMDDP_RELEASE(...) SMDDP_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
// On a function: after it has returned, the caller holds it.
#define SMDDP_ASSERT_CAPABILITY(x) SMDDP_THREAD_ANNOTATION(assert_capability(x))
// On a function: it returns this capability.
#define SMDDP_RETURN_CAPABILITY(x) SMDDP_THREAD_ANNOTATION(lock_returned(x))
// On a function that the analysis cannot follow; a comment says why it is right.
#define SMDDP_NO_THREAD_ANALYSIS SMDDP_THREAD_ANNOTATION(no_thread_safety_analysis)
