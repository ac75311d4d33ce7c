// The floating-point mode of a thread is an input to every sum.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace smddp::reduction {

// Gives the calling thread the default mode (nearest even, denormals kept, no traps) for its own
// lifetime. torch.set_flush_denormal and the like change one thread only; since any thread may run
// a reduction, the numbers would otherwise depend on which one did.
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
  static constexpr Mode kStatus = 0x3f;  // sticky flags, part of the register but not of the mode
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
  // Writing the register drains the pipeline, and nearly always there is nothing to change.
  bool differs() const { return (saved_ & ~kStatus) != kDefault; }

  const Mode saved_;
};

}  // namespace smddp::reduction
