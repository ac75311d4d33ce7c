// From the type and operation of a job to the template that computes it.
//
// A visitor has `template <typename Format, ReduceOp kOp> void run(const Job& job)`. The functions return false where
// the type does not have the operation, as reduction::supports() does. Floating-point numbers and integers are apart,
// so that two compilers can run at once.
#pragma once

#include "cuda/kernels/arithmetic.h"

namespace smddp::cuda {

inline bool isFloat(DataType type) { return type <= DataType::complex128; }

template <typename Format, typename Visitor>
bool visitFloat(const Visitor& visitor, const Job& job) {
  switch (job.op) {
    case ReduceOp::SUM: visitor.template run<Format, ReduceOp::SUM>(job); return true;
    case ReduceOp::AVG: visitor.template run<Format, ReduceOp::AVG>(job); return true;
    case ReduceOp::PRODUCT: visitor.template run<Format, ReduceOp::PRODUCT>(job); return true;
    case ReduceOp::MIN: visitor.template run<Format, ReduceOp::MIN>(job); return true;
    case ReduceOp::MAX: visitor.template run<Format, ReduceOp::MAX>(job); return true;
    case ReduceOp::PREMUL_SUM: visitor.template run<Format, ReduceOp::PREMUL_SUM>(job); return true;
    default: return false;
  }
}

// Complex numbers: real and imaginary parts, each by itself. No product is defined for them.
template <typename Format, typename Visitor>
bool visitComplex(const Visitor& visitor, Job job) {
  if (job.op != ReduceOp::SUM && job.op != ReduceOp::AVG && job.op != ReduceOp::PREMUL_SUM) {
    return false;
  }
  job.count *= 2;
  return visitFloat<Format>(visitor, job);
}

template <typename Visitor>
bool visitFloats(const Visitor& visitor, const Job& job) {
  switch (job.type) {
    case DataType::float32: return visitFloat<Plain<float>>(visitor, job);
    case DataType::float64: return visitFloat<Plain<double>>(visitor, job);
    case DataType::float16: return visitFloat<Float16>(visitor, job);
    case DataType::bfloat16: return visitFloat<Bfloat16>(visitor, job);
    case DataType::complex64: return visitComplex<Plain<float>>(visitor, job);
    case DataType::complex128: return visitComplex<Plain<double>>(visitor, job);
    default: return false;
  }
}

// Sums, products and bitwise operations have the same bits for signed and unsigned integers.
template <typename T, typename Visitor>
bool visitInteger(const Visitor& visitor, const Job& job) {
  using Bits = Plain<std::make_unsigned_t<T>>;
  switch (job.op) {
    case ReduceOp::SUM: visitor.template run<Bits, ReduceOp::SUM>(job); return true;
    case ReduceOp::PRODUCT: visitor.template run<Bits, ReduceOp::PRODUCT>(job); return true;
    case ReduceOp::BAND: visitor.template run<Bits, ReduceOp::BAND>(job); return true;
    case ReduceOp::BOR: visitor.template run<Bits, ReduceOp::BOR>(job); return true;
    case ReduceOp::BXOR: visitor.template run<Bits, ReduceOp::BXOR>(job); return true;
    case ReduceOp::AVG: visitor.template run<Plain<T>, ReduceOp::AVG>(job); return true;
    case ReduceOp::MIN: visitor.template run<Plain<T>, ReduceOp::MIN>(job); return true;
    case ReduceOp::MAX: visitor.template run<Plain<T>, ReduceOp::MAX>(job); return true;
    default: return false;
  }
}

// For bools every operation is one of three.
template <typename Visitor>
bool visitTruth(const Visitor& visitor, const Job& job) {
  switch (job.op) {
    case ReduceOp::SUM:
    case ReduceOp::MAX:
    case ReduceOp::BOR: visitor.template run<Truth, ReduceOp::BOR>(job); return true;
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
    case ReduceOp::BAND: visitor.template run<Truth, ReduceOp::BAND>(job); return true;
    case ReduceOp::BXOR: visitor.template run<Truth, ReduceOp::BXOR>(job); return true;
    default: return false;
  }
}

template <typename Visitor>
bool visitIntegers(const Visitor& visitor, const Job& job) {
  switch (job.type) {
    case DataType::int8: return visitInteger<int8_t>(visitor, job);
    case DataType::int16: return visitInteger<int16_t>(visitor, job);
    case DataType::int32: return visitInteger<int32_t>(visitor, job);
    case DataType::int64: return visitInteger<int64_t>(visitor, job);
    case DataType::uint8: return visitInteger<uint8_t>(visitor, job);
    case DataType::uint16: return visitInteger<uint16_t>(visitor, job);
    case DataType::uint32: return visitInteger<uint32_t>(visitor, job);
    case DataType::uint64: return visitInteger<uint64_t>(visitor, job);
    case DataType::boolean: return visitTruth(visitor, job);
    default: return false;
  }
}

}  // namespace smddp::cuda
