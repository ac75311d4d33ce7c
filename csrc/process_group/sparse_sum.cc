#include "process_group/sparse_sum.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "process_group/staging.h"

namespace smddp::process_group {
namespace {

constexpr size_t kNonZeros = 2;  // of Header

}  // namespace

SparseSum::SparseSum(std::shared_ptr<engine::Engine> engine,
                     std::shared_ptr<engine::groups::Group> group, at::Tensor tensor, int32_t tag,
                     Nanoseconds timeout)
    : engine_(std::move(engine)),
      group_(std::move(group)),
      tensor_(std::move(tensor)),
      mine_([this] {
        const at::AutoDispatchBelowADInplaceOrView noAutograd;
        return tensor_.coalesce();
      }()),
      tag_(tag),
      timeout_(timeout) {
  TORCH_CHECK_VALUE(tensor_.dim() <= kMaxDims, "smddp: all_reduce: a sparse tensor may have ",
                    kMaxDims, " dimensions, got ", tensor_.dim());
  header_ = header();
}

SparseSum::Header SparseSum::header() const {
  Header header{};
  header[0] = static_cast<int64_t>(mine_.scalar_type());
  header[1] = mine_.sparse_dim();
  header[kNonZeros] = mine_._nnz();
  header[3] = mine_.dim();
  std::copy(mine_.sizes().begin(), mine_.sizes().end(), header.begin() + 4);
  return header;
}

engine::calls::CompletionPtr SparseSum::begin() {
  headers_.resize(static_cast<size_t>(group_->spec.size));
  const auto bytes = std::as_writable_bytes(std::span(headers_));
  engine::calls::Request request;
  request.collective = collectives::Collective::AllGather;
  request.input = {std::as_writable_bytes(std::span(header_))};
  request.output = {{bytes.data(), bytes.size()}};
  request.bytes = sizeof header_;
  request.partOf = engine::calls::PartOf::SparseAllReduce;
  request.timeout = timeout_;
  request.keepAlive = shared_from_this();
  proceed({engine_->submit(*group_, std::move(request))}, &SparseSum::exchange);
  return done_;
}

void SparseSum::exchange() {
  const auto me = static_cast<size_t>(group_->spec.me);
  std::vector<engine::calls::CompletionPtr> parts;
  const auto submit = [&](bool send, size_t peer, size_t owner) {
    if (headers_[owner][kNonZeros] == 0) return;
    engine::calls::Message message;
    message.send = send;
    message.peer = static_cast<Rank>(peer);
    message.tag = tag_;
    message.buffer = {bytesOf(indices_[owner]), bytesOf(values_[owner])};
    message.timeout = timeout_;
    message.keepAlive = shared_from_this();
    parts.push_back(engine_->submit(*group_, std::move(message)));
  };
  for (size_t rank = 0; rank < headers_.size(); ++rank) {
    Header theirs = headers_[rank];
    const int64_t nonZeros = std::exchange(theirs[kNonZeros], header_[kNonZeros]);
    if (theirs != header_ || nonZeros < 0) {
      const Error error(
          ErrorKind::Mismatch,
          fmt::format("all_reduce of sparse tensors: rank {} has another shape, dtype "
                      "or number of sparse dimensions than rank {}",
                      group_->membership.jobRank(static_cast<Rank>(rank)),
                      group_->membership.jobRank(static_cast<Rank>(me))));
      engine_->fail(*group_, error);
      throw error;
    }
    auto sizes = mine_.values().sizes().vec();
    sizes.front() = nonZeros;
    const bool isMe = rank == me;
    indices_.push_back(isMe ? mine_.indices().contiguous()
                            : at::empty({header_[1], nonZeros}, mine_.indices().options()));
    values_.push_back(isMe ? mine_.values().contiguous()
                           : at::empty(sizes, mine_.values().options()));
  }
  for (size_t rank = 0; rank < headers_.size(); ++rank) {
    if (rank != me) submit(false, rank, rank);
  }
  for (size_t rank = 0; rank < headers_.size(); ++rank) {
    if (rank != me) submit(true, rank, me);
  }
  proceed(parts, &SparseSum::add);
}

void SparseSum::add() {
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  at::Tensor sum;
  for (size_t rank = 0; rank < headers_.size(); ++rank) {
    const at::Tensor one = at::_sparse_coo_tensor_unsafe(indices_[rank], values_[rank],
                                                         mine_.sizes(), values_[rank].options(),
                                                         /*is_coalesced=*/true);
    sum = sum.defined() ? at::add(sum, one) : one;
  }
  tensor_.copy_(sum.coalesce());
  end(std::nullopt);
}

void SparseSum::proceed(const std::vector<engine::calls::CompletionPtr>& parts,
                        void (SparseSum::*step)()) {
  const auto self = shared_from_this();
  const auto next = [self, parts, step] {
    try {
      for (const auto& part : parts) {
        if (part->error()) throw *part->error();
      }
      (self.get()->*step)();
    } catch (const Error& error) {
      self->end(error);
    } catch (const std::exception& error) {
      self->end(Error(ErrorKind::Internal, error.what()));
    }
  };
  if (parts.empty()) {
    next();
    return;
  }
  const auto left = std::make_shared<std::atomic<size_t>>(parts.size());
  for (const auto& part : parts) {
    part->then([left, next] {
      if (left->fetch_sub(1) == 1) next();
    });
  }
}

void SparseSum::end(std::optional<Error> error) {
  engine_->progress().complete(*done_, std::move(error));
}

}  // namespace smddp::process_group
