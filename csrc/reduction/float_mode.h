// The floating-point mode of a thread affects every sum.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace smddp::reduction {

// Sets the default mode (nearest even, denormals kept, no traps) on the calling thread while the object lives.
// torch.set_flush_denormal and the like change one thread only. Any thread may run a reduction, so without this the
// results would depend on the thread.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(read()) {
    if (differs()) write(kDefault);
  }
  ~DefaultFloatMode() {
    if (differs()) write(saved_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Mode = uint32_t;
  static constexpr Mode kDefault = 0x1f80;  // all exceptions masked, nothing else
  static constexpr Mode kStatus =
      0x3f;  // sticky flags in the register, which are not part of the mode
  static Mode read() { return _mm_getcsr(); }
  static void write(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode kDefault = 0;
  static constexpr Mode kStatus = 0;
  static Mode read() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(Mode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
#error "csrc/reduction/float_mode.h: add the floating-point control register of this architecture"
#endif
  // A write to the register drains the pipeline, and it is nearly never needed.
  bool differs() const { return (saved_ & ~kStatus) != kDefault; }

  const Mode saved_;
};

}  // namespace smddp::reduction
