#include "process_group/elastic_members.h"

#include <algorithm>
#include <utility>

#include "process_group/errors.h"
#include "process_group/hooks.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE
namespace smddp::process_group {

using engine::agreement::Agreement;
using engine::agreement::Generation;
using engine::agreement::Member;

namespace {

// Those of the first handles, as many as there are cards.
std::vector<Member> membersOf(const std::vector<bootstrap::Handle>& handles,
                              const std::vector<std::string>& cards) {
  std::vector<Member> members;
  for (size_t i = 0; i < cards.size(); ++i) {
    members.push_back(engine::MemberAgreement::memberOf(handles[i], cards[i]));
  }
  return members;
}

}  // namespace

ElasticMembers::ElasticMembers(c10::intrusive_ptr<ProcessGroup> group, Nanoseconds grace)
    : group_(std::move(group)),
      card_(group_->get_reconfigure_handle()),
      agreement_(group_->meetingPoint(), card_, grace) {
  const std::lock_guard lock(group_->meetingMutex_);
  group_->outlivesLosses_ = true;
}

ElasticMembers::Members ElasticMembers::begin(const std::vector<std::string>& cards, int64_t step,
                                              Nanoseconds timeout) {
  const std::lock_guard lock(group_->meetingMutex_);
  return translated([&] {
    const auto handles = group_->meetingPoint().parseHandles(cards, false);
    group_->changeMembers(handles, 1, timeout);
    agreement_.begin({1, membersOf(handles, cards), step});
    return membersSince({});
  });
}

ElasticMembers::Members ElasticMembers::join(const std::vector<std::string>& cards,
                                             Nanoseconds timeout) {
  const std::lock_guard lock(group_->meetingMutex_);
  return translated([&] {
    const Deadline deadline = Deadline::after(clock_, timeout);
    auto texts = cards;
    texts.push_back(card_);
    const auto handles = group_->meetingPoint().parseHandles(texts, false);
    agreement_.join(membersOf(handles, cards), timeout);
    return install({}, deadline);
  });
}

void ElasticMembers::hear(const std::string& card) {
  const std::lock_guard lock(group_->meetingMutex_);
  translated([&] { agreement_.hear(card); });
}

size_t ElasticMembers::numNewcomers() {
  const std::lock_guard lock(group_->meetingMutex_);
  return translated([&] { return agreement_.numNewcomers(); });
}

ElasticMembers::Members ElasticMembers::agree(int64_t committed, int64_t voted,
                                              Nanoseconds timeout) {
  const std::lock_guard lock(group_->meetingMutex_);
  // The loss of a member is no failure, unless there is no agreement. So abort hooks, such as the one with which the
  // Flight Recorder writes its dump for seconds, do not run before that.
  const auto fail = [&] { HookThread::ofThisProcess().groupFailed(group_->hooks_, false); };
  try {
    const Members members = translated([&] {
      const Deadline deadline = Deadline::after(clock_, timeout);
      const Generation before = agreement_.state().current();
      agreement_.agree(committed, voted, timeout);
      return install(before, deadline);
    });
    if (!members.out.empty()) fail();
    return members;
  } catch (const BackendError&) {
    fail();
    throw;
  }
}

// A member of the new generation may be lost before the group has it. Then there will be another one.
ElasticMembers::Members ElasticMembers::install(const Generation& before,
                                                const Deadline& deadline) {
  while (agreement_.state().state() != Agreement::State::Out) {
    const auto left = [&] { return std::max<Nanoseconds>(deadline.at - clock_.now(), 1); };
    const Generation& now = agreement_.state().current();
    try {
      group_->changeMembers(agreement_.handles(), static_cast<int64_t>(now.number), left());
      return membersSince(before);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::PeerLost) throw;
    }
    agreement_.agree(now.step, now.step, left());
  }
  Members out;
  out.out = agreement_.state().whyOut();
  return out;
}

ElasticMembers::Members ElasticMembers::membersSince(const Generation& before) {
  const Generation& now = agreement_.state().current();
  Members members{now.number, group_->getRank(), {}, now.step, {}, {}, {}};
  for (const Member& member : now.members) {
    members.cards.push_back(member.card);
    if (before.find(member.id) == nullptr) {
      members.came.push_back(agreement_.describe(now, member.id));
    }
  }
  for (const Member& member : before.members) {
    if (now.find(member.id) == nullptr) {
      members.left.push_back(agreement_.describe(before, member.id));
    }
  }
  return members;
}

}  // namespace smddp::process_group
#endif
