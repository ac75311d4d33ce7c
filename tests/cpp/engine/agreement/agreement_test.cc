// Simulates jobs whose processes die, stop and continue, and whose hosts are cut off from one another, while they train
// and agree on their members. A seed is a job. No step may count in two groups, and no two groups may go on. A member
// must be able to apply the step that it is told of. In the end nobody may wait.
//
// Half of the jobs have an adversary, which kills a process when it has sent or received a certain message of the
// agreement: deaths at random moments hardly ever meet one.
#include "engine/agreement/agreement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "engine/agreement/agreement_codec.h"

namespace smddp::engine::agreement {
namespace {

using Kind = Message::Kind;

constexpr double kHostTimeout = 4000, kLongestStop = 6000;  // milliseconds, as all times here
constexpr double kForEver = 1e9;

Nanoseconds nanoseconds(double milliseconds) {
  return static_cast<Nanoseconds>(milliseconds * 1e6);
}

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  Rules rules{};
  bool adversary = false;
  bool believesResets = false;  // planted: a reset counts as a death also after a silence
};

class World {
 public:
  World(uint64_t seed, const Options& options) : options_(options), random_(seed) {
    const size_t size = 2 + pick(5);
    hosts_ = 1 + pick(size);
    isLazy_ = pick(2) == 0;
    evicts_ = pick(2) == 0;
    Generation first{1, {}, 0};
    for (size_t i = 0; i < size; ++i) first.members.push_back({i + 1, "card"});
    for (size_t i = 0; i < size; ++i) {
      addProcess(i < hosts_ ? i : pick(hosts_));
      processes_[i]->agreement.begin(first);
      processes_[i]->generation = 1;
      at(uniform(0, 50), [this, i] { work(*processes_[i], 1); });
    }
    for (size_t kills = options.adversary ? 1 + pick(2) : 0; kills > 0; --kills) {
      plan_.push_back(
          {static_cast<Kind>(pick(static_cast<size_t>(Kind::Minority))), 1 + pick(6), pick(3)});
    }
    double when = uniform(100, 300);
    for (size_t faults = 1 + pick(4); faults > 0; --faults) {
      planFault(when);
      when +=
          std::array{uniform(0, 3), uniform(0, 60), uniform(0, 3990), uniform(3990, 4200)}[pick(4)];
    }
    for (size_t newcomers = pick(3); newcomers > 0; --newcomers) {
      at(uniform(100, 9000), [this] { knock(addProcess(pick(hosts_))); });
    }
  }

  void run() {
    const double rest = 24000;
    while (!events_.empty()) {
      auto event = events_.top();
      if (event.when > std::max(lastFault_, 9000.0) + rest) break;
      events_.pop();
      now_ = event.when;
      event.action();
    }
    check();
  }
  size_t numKills() const { return kills_; }
  size_t numGoingOn() const { return goingOn_; }

 private:
  struct Process {
    Process(MemberId id, size_t host, const Rules& rules)
        : id(id), host(host), agreement({id, "card"}, rules) {}
    const MemberId id;
    const size_t host;
    Agreement agreement;
    bool isAlive = true;
    bool isComputing = false;
    uint64_t generation = 0;
    int64_t step = 0, voted = 0;
    std::map<std::pair<uint64_t, int64_t>, std::set<MemberId>> votes;
    double stoppedUntil = 0, awakeSince = 0;
    double tickAt = -1;
    std::optional<double> agreeingSince;
    int knocks = 0;
    std::vector<std::function<void()>> whileStopped, whileComputing;
    bool isOut() const { return agreement.state() == Agreement::State::Out; }
    bool isAgreeing() const { return agreement.state() == Agreement::State::Agreeing; }
    bool isMember() const { return agreement.current().number > 0; }
  };
  struct Event {
    double when;
    uint64_t number;
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return std::tie(other.when, other.number) < std::tie(when, number);
    }
  };
  struct Cut {
    size_t one, other;
    double from, to;
    bool isOf(size_t x, size_t y) const {
      return (x == one && y == other) || (x == other && y == one);
    }
  };
  struct Kill {
    Kind kind;
    size_t left;
    size_t whom;  // 0: the receiver, before it reads; 1: the receiver, after that; 2: the sender
  };

  size_t pick(size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random_); }
  double uniform(double low, double high) {
    return std::uniform_real_distribution<>(low, high)(random_);
  }
  void at(double when, std::function<void()> action) {
    events_.push({std::max(when, now_), ++numEvents_, std::move(action)});
  }
  void later(double pause, std::function<void()> action) { at(now_ + pause, std::move(action)); }
  Process& addProcess(size_t host) {
    processes_.push_back(std::make_unique<Process>(processes_.size() + 1, host, options_.rules));
    return *processes_.back();
  }
  Process& find(MemberId id) { return *processes_.at(id - 1); }

  void log(const std::string& text) {
    if (isTraced_) std::printf("%9.1f %s\n", now_, text.c_str());
  }

  // --- faults ---
  void planFault(double when) {
    lastFault_ = std::max(lastFault_, when);
    const double kind = uniform(0, 1);
    if (kind < 0.55) {
      at(when, [this, i = pick(processes_.size())] { crash(*processes_[i]); });
    } else if (kind < 0.8 && hosts_ > 1) {
      const size_t host = pick(hosts_);
      const double length = std::array{uniform(100, 3900), uniform(3900, 4300),
                                       uniform(4300, 20000), kForEver}[pick(4)];
      const bool fromAll = pick(5) < 3;
      const size_t only = pick(hosts_);
      for (size_t other = 0; other < hosts_; ++other) {
        if (other == host || (!fromAll && other != only)) continue;
        at(when, [=, this] { cut(host, other, when, when + length); });
      }
      if (length < kForEver) lastFault_ = std::max(lastFault_, when + length);
    } else {
      const double length = pick(2) == 0 ? uniform(100, 3000) : uniform(5000, 15000);
      at(when, [=, this, i = pick(processes_.size())] { stop(*processes_[i], length); });
      lastFault_ = std::max(lastFault_, when + length);
    }
  }
  const Cut* cutBetween(size_t x, size_t y) const {
    for (const Cut& cut : cuts_) {
      if (x != y && cut.isOf(x, y) && cut.from <= now_ && now_ < cut.to) return &cut;
    }
    return nullptr;
  }
  void crash(Process& dead) {
    if (!dead.isAlive) return;
    dead.isAlive = false;
    log(fmt::format("{} dies", dead.id));
    for (auto& other : processes_) {
      if (other->isAlive) seeDeath(*other, dead);
    }
  }
  void seeDeath(Process& who, Process& dead) {
    const bool certain =
        options_.believesResets || std::none_of(cuts_.begin(), cuts_.end(), [&](const Cut& cut) {
          return who.host != dead.host && cut.isOf(who.host, dead.host) && cut.to <= now_ &&
                 now_ - cut.to < kHostTimeout / 4 && cut.to - cut.from > kHostTimeout / 4;
        });
    const auto how = [](bool isDead) { return isDead ? Suspicion::Dead : Suspicion::Silent; };
    const Cut* cut = cutBetween(who.host, dead.host);
    if (cut == nullptr) {
      later(uniform(1, 30), [&, how = how(certain)] { suspect(who, dead.id, how); });
    } else if (cut->to < kForEver) {  // seen when the link is back
      const bool wasShort = cut->to - cut->from < kHostTimeout / 4;
      at(cut->to + uniform(1, 30),
         [&, how = how(wasShort || options_.believesResets)] { suspect(who, dead.id, how); });
    }
  }
  void cut(size_t one, size_t other, double from, double to) {
    cuts_.push_back({one, other, from, to});
    log(fmt::format("hosts {} and {} are cut until {:.0f}", one, other, to));
    for (auto& p : processes_) {
      for (auto& q : processes_) {
        if ((p->host != one || q->host != other) && (p->host != other || q->host != one)) continue;
        noticeSilence(*p, *q, to);
      }
    }
  }
  void noticeSilence(Process& process, Process& other, double to) {
    later(kHostTimeout * uniform(0.97, 1.05), [this, &process, &other, to] {
      if (!process.isAlive || to <= now_) return;
      suspect(process, other.id, Suspicion::Silent);
      // It says so, and is heard when the link is back.
      if (to >= kForEver) return;
      at(to + uniform(0.1, 3),
         [=, this, &process, &other] { suspect(other, process.id, Suspicion::Silent); });
    });
  }
  void stop(Process& process, double length) {
    if (!process.isAlive) return;
    process.stoppedUntil = now_ + length;
    log(fmt::format("{} stops for {:.0f}", process.id, length));
    later(length, [this, &process, length] { resume(process, length); });
    if (!evicts_ || length <= kLongestStop) return;
    for (auto& other : processes_) {
      if (other.get() == &process) continue;
      later(kLongestStop * uniform(0.97, 1.05), [this, &other = *other, &process] {
        if (!process.isAlive || !other.isAlive || now_ >= process.stoppedUntil) return;
        if (other.host == process.host) return crash(process);  // killed first
        suspect(other, process.id, Suspicion::Silent);
        at(process.stoppedUntil + 1,
           [this, &other, &process] { suspect(process, other.id, Suspicion::Silent); });
      });
    }
  }
  void resume(Process& process, double length) {
    if (!process.isAlive || now_ < process.stoppedUntil) return;
    if (length > kHostTimeout / 4) process.awakeSince = now_;
    for (auto& action : std::exchange(process.whileStopped, {})) action();
  }
  bool sleeps(Process& process, const std::function<void()>& action) {
    if (now_ >= process.stoppedUntil) return false;
    process.whileStopped.push_back(action);
    return true;
  }

  // --- messages ---
  void send(Process& from, Process& to, Kind kind, std::function<void()> read, bool isVote) {
    const double delay = &from == &to ? 0 : pick(20) > 0 ? uniform(0.05, 2) : uniform(2, 60);
    later(delay, [this, &from, &to, kind, read = std::move(read), isVote] {
      deliver(from, to, kind, read, isVote);
    });
  }
  void deliver(Process& from, Process& to, Kind kind, const std::function<void()>& read,
               bool isVote) {
    if (!to.isAlive || (!from.isAlive && pick(2) == 0)) return;
    if (const Cut* cut = cutBetween(from.host, to.host)) {
      if (cut->to < kForEver) {
        at(cut->to + uniform(0.1, 3),
           [=, this, &from, &to] { deliver(from, to, kind, read, isVote); });
      }
      return;
    }
    if (sleeps(to, [=, this, &from, &to] { deliver(from, to, kind, read, isVote); })) return;
    Kill* mine = nullptr;
    for (Kill& kill : plan_) {
      if (!isVote && kill.kind == kind && &from != &to && kill.left > 0 && --kill.left == 0)
        mine = &kill;
    }
    if (mine != nullptr) {
      ++kills_;
      lastFault_ = std::max(lastFault_, now_);
    }
    if (!isVote && isTraced_)
      log(fmt::format("    {} -> {} {}", from.id, to.id, static_cast<int>(kind)));
    if (mine != nullptr && mine->whom == 0) crash(to);
    if (to.isAlive) read();
    if (mine != nullptr && mine->whom == 1) crash(to);
    if (mine != nullptr && mine->whom == 2) crash(from);
  }

  // --- training: a vote in each step ---
  void work(Process& process, uint64_t generation) {
    if (!process.isAlive || process.isOut() || process.generation != generation ||
        process.isAgreeing())
      return;
    if (sleeps(process, [=, this, &process] { work(process, generation); })) return;
    process.isComputing = false;
    for (auto& action : std::exchange(process.whileComputing, {})) action();
    if (process.generation != generation || process.isAgreeing() || process.isOut()) return;
    process.voted = process.step + 1;
    for (const Member& member : process.agreement.current().members) {
      Process& to = find(member.id);
      send(
          process, to, Kind::Commit,
          [=, this, &process, &to, step = process.voted] {
            to.votes[{generation, step}].insert(process.id);
            countVotes(to);
          },
          true);
    }
  }
  void countVotes(Process& process) {
    if (process.isAgreeing() || process.isOut() || !process.isMember()) return;
    if (process.voted != process.step + 1) return;
    const auto& votes = process.votes[{process.generation, process.voted}];
    for (const Member& member : process.agreement.current().members) {
      if (!votes.contains(member.id)) return;
    }
    ++process.step;
    commit(process);
    if (process.agreement.numNewcomers() > 0) {
      return act(process, [&] { process.agreement.start(nanoseconds(now_)); });
    }
    compute(process, now_ < 1500 ? uniform(5, 60) : uniform(5, 700));
  }
  void compute(Process& process, double time) {
    process.isComputing = isLazy_;
    later(time,
          [=, this, &process, generation = process.generation] { work(process, generation); });
  }
  void commit(Process& process) {
    const auto [found, isNew] =
        committed_.emplace(process.step, process.agreement.current().members);
    if (!isNew && found->second != process.agreement.current().members) {
      throw Violation("two groups have committed one step");
    }
  }

  // --- agreement ---
  // Does something with the agreement of a process, and what follows from that.
  void act(Process& process, const std::function<void()>& action) {
    if (!process.isAlive || process.isOut()) return;
    process.agreement.setProgress(process.step, process.voted);
    action();
    const Generation now = process.agreement.current();
    for (auto& [to, message] : process.agreement.takeOutgoing()) {
      // As bytes, as between processes.
      const auto bytes = serialise(process.id, message);
      Process& receiver = find(to.id);
      send(
          process, receiver, message.kind, [this, &receiver, bytes] { receive(receiver, bytes); },
          false);
    }
    if (process.isOut()) {
      log(fmt::format("{} is out: {}", process.id, process.agreement.whyOut()));
      later(uniform(1, 100), [this, &process] { crash(process); });  // it exits
      return;
    }
    if (!process.isAgreeing()) process.agreeingSince.reset();
    if (process.isAgreeing() && !process.agreeingSince) process.agreeingSince = now_;
    if (now.number != process.generation) installed(process, now);
    if (process.isAgreeing() && process.tickAt < now_ && process.isMember()) {
      process.tickAt =
          std::max(now_ + 0.001, static_cast<double>(process.agreement.nextTick()) * 1e-6);
      at(process.tickAt, [this, &process] { tick(process); });
    }
  }
  void tick(Process& process) {
    if (sleeps(process, [this, &process] { tick(process); })) return;
    process.tickAt = -1;
    act(process, [&] { process.agreement.tick(nanoseconds(now_)); });
  }
  void receive(Process& process, const std::vector<std::byte>& bytes) {
    const auto [from, message] = parseMessage(bytes);
    // While a member computes, it answers only those that are behind.
    if (process.isComputing && message.generation >= process.generation) {
      process.whileComputing.push_back([this, &process, bytes] { receive(process, bytes); });
      return;
    }
    act(process, [&, from = from, &message = message] {
      process.agreement.onMessage(from, message, nanoseconds(now_));
    });
  }
  void suspect(Process& process, MemberId who, Suspicion how) {
    if (!process.isAlive || process.isOut() || process.id == who) return;
    if (sleeps(process, [=, this, &process] { suspect(process, who, how); })) return;
    if (process.isComputing) {
      process.whileComputing.push_back([=, this, &process] { suspect(process, who, how); });
      return;
    }
    // This process was away itself.
    if (!options_.believesResets && process.awakeSince > 0 && now_ - process.awakeSince < 100) {
      how = Suspicion::Silent;
    }
    log(fmt::format("{} takes {} for {}", process.id, who,
                    how == Suspicion::Dead ? "dead" : "silent"));
    act(process, [&] { process.agreement.suspect(who, how, nanoseconds(now_)); });
  }
  void installed(Process& process, const Generation& now) {
    const bool canApply = process.step == now.step - 1 && process.voted >= now.step;
    if (process.generation > 0 && process.step < now.step && !canApply) {
      throw Violation("a member is told of a step that it cannot apply");
    }
    if (process.generation > 0 && process.step > now.step) {
      throw Violation("a member is told that a step does not count that it has committed");
    }
    std::string names;
    for (const Member& member : now.members) names += fmt::format(" {}", member.id);
    log(fmt::format("{}: generation {} of{}, step {}", process.id, now.number, names, now.step));
    process.generation = now.number;
    process.step = process.voted = now.step;
    for (const auto& other : processes_) {
      if (other->isAlive && !other->isOut() && other->generation == now.number &&
          other->agreement.current() != now) {
        throw Violation("two different generations of one number");
      }
    }
    if (now.number > 100) throw Violation("agreements without end");
    for (const Member& member : now.members) {
      Process& other = find(member.id);
      if (!other.isAlive) seeDeath(process, other);
      if (const Cut* cut = cutBetween(process.host, other.host))
        noticeSilence(process, other, cut->to);
    }
    if (!process.isAgreeing()) compute(process, uniform(1, 30));
  }
  void knock(Process& newcomer) {
    if (!newcomer.isAlive || newcomer.isMember() || newcomer.isOut()) return;
    if (newcomer.agreement.state() == Agreement::State::Working) newcomer.agreement.awaitFirst();
    // Some member may not hear it, and hinder the others.
    if (++newcomer.knocks > 10) return crash(newcomer);
    std::vector<Process*> members;
    for (auto& process : processes_) {
      if (process->isAlive && process->isMember() && !process->isOut())
        members.push_back(process.get());
    }
    if (!members.empty()) {
      Process& to = *members[pick(members.size())];
      const Member who{newcomer.id, "card"};
      later(uniform(0.05, 2), [this, &to, &newcomer, who] {
        if (to.isAlive && cutBetween(to.host, newcomer.host) == nullptr) to.agreement.hear(who);
      });
    }
    later(700, [this, &newcomer] { knock(newcomer); });
  }

  void check() {
    std::set<uint64_t> numbers;
    for (const auto& process : processes_) {
      if (!process->isAlive || !process->isMember() || process->isOut()) continue;
      if (process->isAgreeing() && now_ - *process->agreeingSince > 15000) {
        throw Violation("somebody still waits in the end");
      }
      if (process->isAgreeing()) continue;
      numbers.insert(process->generation);
      ++goingOn_;
      for (const Member& member : process->agreement.current().members) {
        if (!find(member.id).isAlive) throw Violation("a group goes on with the dead");
      }
    }
    if (numbers.size() > 1) throw Violation("two groups go on");
  }

  const Options options_;
  std::mt19937_64 random_;
  std::vector<Kill> plan_;
  size_t hosts_ = 0;
  bool isLazy_ = false;  // a member that computes reads its messages when it is done
  bool evicts_ = false;
  const bool isTraced_ = std::getenv("AGREEMENT_TRACE") != nullptr;
  double now_ = 0, lastFault_ = 0;
  uint64_t numEvents_ = 0;
  size_t kills_ = 0, goingOn_ = 0;
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<Cut> cuts_;
  std::map<int64_t, std::vector<Member>> committed_;  // by step: who
};

// The first seed that shows a violation, and which.
struct Found {
  uint64_t seed;
  std::string what;
};
std::optional<Found> search(uint64_t first, uint64_t count, Options options,
                            size_t* kills = nullptr) {
  for (uint64_t seed = first; seed < first + count; ++seed) {
    options.adversary = seed % 2 == 1;
    World world(seed, options);
    try {
      world.run();
    } catch (const Violation& violation) {
      return Found{seed, violation.what()};
    }
    if (kills != nullptr) *kills += world.numKills();
  }
  return std::nullopt;
}

uint64_t firstSeed() {
  const char* text = std::getenv("AGREEMENT_SEED");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}
uint64_t numSeeds() {
  if (const char* text = std::getenv("AGREEMENT_SEEDS")) return std::strtoull(text, nullptr, 10);
  return std::getenv("ALL_SEEDS") != nullptr ? 1'000'000 : 6'000;
}

TEST(AgreementTest, JobsAgreeWhateverHappens) {
  size_t kills = 0;
  const auto found = search(firstSeed(), numSeeds(), {}, &kills);
  ASSERT_FALSE(found) << "seed " << found->seed << ": " << found->what;
  if (numSeeds() < 1000) return;
  EXPECT_GT(kills, numSeeds() / 10) << "the adversary does not reach the agreement";
}

struct Mutant {
  const char* name;
  std::function<void(Options&)> plant;
  uint64_t firstSeed = 0;
};
class AgreementMutantTest : public testing::TestWithParam<Mutant> {};

TEST_P(AgreementMutantTest, EachRuleIsNeeded) {
  Options options;
  GetParam().plant(options);
  const auto found = search(GetParam().firstSeed, 100'000, options);
  ASSERT_TRUE(found) << "nothing goes wrong without the rule";
  RecordProperty("found", fmt::format("seed {}: {}", found->seed, found->what));
}

INSTANTIATE_TEST_SUITE_P(
    Rules, AgreementMutantTest,
    testing::Values(
        Mutant{"TheDeadDoNotCount", [](Options& o) { o.rules.ignoresTheDead = true; }},
        Mutant{"AcceptedIsForgotten", [](Options& o) { o.rules.ignoresAccepted = true; }},
        Mutant{"OldBallotsAreAccepted", [](Options& o) { o.rules.acceptsOldBallots = true; }},
        Mutant{"TheHighestStepCounts", [](Options& o) { o.rules.takesHighestStep = true; }},
        Mutant{"SilenceBecomesDeath", [](Options& o) { o.rules.silenceBecomesDeath = true; }},
        Mutant{"EitherHalfGoesOn", [](Options& o) { o.rules.needsNoFirst = true; }},
        Mutant{"OneAnswerLess", [](Options& o) { o.rules.commitsWithoutAll = true; }},
        Mutant{"KnocksOutliveGenerations", [](Options& o) { o.rules.keepsKnocks = true; }},
        // Rare: none of the seeds before shows it.
        Mutant{"ResetsAreBelieved", [](Options& o) { o.believesResets = true; }, 121'000}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace smddp::engine::agreement
