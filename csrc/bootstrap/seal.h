// What SMDDP_JOB_TOKEN is for: bytes that others could have written prove that they come from the job.
//
// A seal is a MAC under the token, bound to a purpose (where the bytes lie, who speaks to whom), so that it is
// worth nothing anywhere else. It hides nothing. Without a token a seal is empty, and anybody's bytes pass.
// Immutable; any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bootstrap/sha256.h"

namespace smddp::bootstrap {

class Seal {
 public:
  explicit Seal(std::string token = {}) : token_(std::move(token)) {}

  bool isEmpty() const { return token_.empty(); }

  // Under the token; all zeros without one.
  Digest sign(std::string_view purpose, std::span<const std::byte> bytes) const;

  // `bytes` with the seal behind them.
  std::vector<std::byte> close(std::string_view purpose, std::span<const std::byte> bytes) const;

  enum class Verdict {
    Good,
    NoToken,     // the writer has none, we do
    Unexpected,  // the writer has one, we do not
    OtherToken,  // or other bytes, or for another purpose
  };
  // Takes the seal off what close() returned.
  Verdict open(std::string_view purpose, std::vector<std::byte>& sealed) const;

 private:
  std::string token_;
};

}  // namespace smddp::bootstrap
