#include "process_group/device/nccl_group.h"

#include "common/log.h"
#include "process_group/errors.h"

namespace smddp::process_group::device {

Error errorOfRank(Rank rank, const std::string& what) {
  return Error(ErrorKind::Transport,
               fmt::format("rank {} could not do its part on the device: {}", rank, what));
}

std::shared_ptr<NcclGroup> NcclGroup::make(std::shared_ptr<engine::Engine> engine,
                                           std::shared_ptr<engine::groups::Group> group,
                                           c10::intrusive_ptr<c10d::Backend> backend,
                                           Action before) {
  auto made = std::make_shared<NcclGroup>(engine, group, std::move(backend));
  engine->onBreak(*group, [weak = std::weak_ptr(made), before](const Error& error) {
    const auto nccl = weak.lock();
    if (!nccl) return;
    if (before) before(error);
    SMDDP_LOG(Warn, "process_group",
              "what NCCL had enqueued for group \"{}\" is aborted, and has no result: {}",
              nccl->group_->spec.name, error.what());
    nccl->abort();
  });
  engine->watchMembers(*group);
  return made;
}

NcclGroup::NcclGroup(std::shared_ptr<engine::Engine> engine,
                     std::shared_ptr<engine::groups::Group> group,
                     c10::intrusive_ptr<c10d::Backend> backend)
    : engine_(std::move(engine)), group_(std::move(group)), backend_(std::move(backend)) {}

void NcclGroup::throwFailure() const {
  throwAsTorch(engine_->failureOf(*group_).value_or(
      Error(ErrorKind::Aborted, "smddp: NCCL was aborted, since its group has failed")));
}

void NcclGroup::failed(const std::string& what) {
  engine_->fail(*group_, errorOfRank(group_->spec.me, what));
  throwFailure();
}

void NcclGroup::abort() {
  // First: so nobody takes an error that the abort causes for the cause of the failure.
  failed_.store(true, std::memory_order_release);
  std::call_once(aborted_, [this] {
    if (!ended_) backend_->abort();
  });
}

void NcclGroup::shutdown() {
  backend_->shutdown();
  ended_ = true;
}

}  // namespace smddp::process_group::device
