// Seals: with SMDDP_JOB_TOKEN, what ranks write to the store, and what they send to other nodes, carries a proof that
// the sender belongs to the job.
//
// A seal is a MAC under the token. It is bound to a purpose (the key of the bytes, or sender and receiver), so that it
// is not valid anywhere else. It encrypts nothing. Without a token a seal is empty, and all bytes are accepted.
// Immutable; any thread may use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/sha256.h"

namespace smddp {

class Seal {
 public:
  explicit Seal(std::string token = {}) : token_(std::move(token)) {}

  bool isEmpty() const { return token_.empty(); }

  // The MAC under the token; all zeros without a token.
  Digest sign(std::string_view purpose, std::span<const std::byte> bytes) const;

  // The proof that messages between two processes carry: the beginning of a MAC of their ids; 0 without a token.
  uint64_t proof(std::string_view purpose, uint64_t sender, uint64_t receiver) const;

  // Returns `bytes` followed by the seal.
  std::vector<std::byte> close(std::string_view purpose, std::span<const std::byte> bytes) const;

  enum class Verdict {
    Good,
    NoToken,     // we have a token, the writer has none
    Unexpected,  // the writer has a token, we have none
    OtherToken,  // another token, or changed bytes, or another purpose
  };
  // Checks the seal of the bytes that close() returned, and removes it.
  Verdict open(std::string_view purpose, std::vector<std::byte>& sealed) const;

 private:
  std::string token_;
};

}  // namespace smddp
