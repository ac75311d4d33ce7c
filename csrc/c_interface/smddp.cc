// The C interface (smddp.h): checks arguments, calls the engine, and turns exceptions into codes.
#include "c_interface/smddp.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "common/config.h"
#include "common/interrupt.h"
#include "common/log.h"
#include "engine/process/capabilities.h"
#include "engine/shared_engine.h"
#include "engine/split.h"
#include "engine/wire_choice.h"
#include "store/client.h"
#include "store/server.h"

using smddp::Error;
using smddp::ErrorKind;
using smddp::Nanoseconds;
using smddp::raise;
using smddp::Rank;
using smddp::settings;
using smddp::engine::Engine;
namespace collectives = smddp::collectives;
namespace engine = smddp::engine;

struct smddp_group {
  smddp_group() = default;
  smddp_group(const smddp_group&) = delete;
  smddp_group& operator=(const smddp_group&) = delete;
  ~smddp_group();

  std::shared_ptr<Engine> engine;
  std::shared_ptr<engine::groups::Group> group;
  Nanoseconds timeout = 0;
};

struct smddp_operation {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<engine::groups::Group> group;
  engine::calls::CompletionPtr completion;
};

namespace {

// The enumerations of smddp.h have the values of those of the engine.
static_assert(SMDDP_BOOL + 1 == smddp::kNumDataTypes);
static_assert(SMDDP_BOOL == static_cast<int>(smddp::DataType::boolean));
static_assert(SMDDP_BFLOAT16 == static_cast<int>(smddp::DataType::bfloat16));
static_assert(SMDDP_INT8 == static_cast<int>(smddp::DataType::int8));
static_assert(SMDDP_UINT8 == static_cast<int>(smddp::DataType::uint8));
static_assert(SMDDP_SCALED_SUM + 1 == smddp::kNumReduceOps);
static_assert(SMDDP_BAND == static_cast<int>(smddp::ReduceOp::BAND));
static_assert(SMDDP_SCALED_SUM == static_cast<int>(smddp::ReduceOp::PREMUL_SUM));
static_assert(SMDDP_ALLTOALL + 1 == collectives::kNumCollectives);
static_assert(SMDDP_BARRIER == static_cast<int>(collectives::Collective::Barrier));
static_assert(SMDDP_ALLTOALL == static_cast<int>(collectives::Collective::AllToAll));
static_assert(SMDDP_INTERNAL == static_cast<int>(ErrorKind::Internal) + 1);

// The names in smddp.h, which those of smddp.numpy are, too.
constexpr std::array<const char*, smddp::kNumReduceOps> kOps = {
    "SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "SCALED_SUM"};

class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted"; }
};

std::string& lastError() {
  thread_local std::string text;
  return text;
}

// Errors of operations name smddp already.
void noteError(const std::string& text) {
  constexpr std::string_view kName = "smddp: ";
  lastError() = text.starts_with(kName) ? text : std::string(kName) + text;
}

smddp_status statusOf(const Error& error) {
  noteError(error.what());
  return static_cast<smddp_status>(static_cast<int>(error.kind()) + 1);
}

// Runs `action`, which returns a status; turns what it throws into one.
template <typename Action>
smddp_status translated(const Action& action) {
  try {
    return action();
  } catch (const Error& error) {
    return statusOf(error);
  } catch (const Interrupted&) {
    noteError("a wait was interrupted");
    return SMDDP_INTERRUPTED;
  } catch (const std::bad_alloc&) {
    noteError("no memory is left");
    return SMDDP_RESOURCE;
  } catch (const std::exception& error) {
    noteError(error.what());
    return SMDDP_INTERNAL;
  }
}

void require(bool holds, const char* text) {
  if (!holds) raise(ErrorKind::Usage, "{}", text);
}

// For functions that return no status.
bool isGiven(auto* argument) {
  if (argument == nullptr) noteError("an argument is null");
  return argument != nullptr;
}

Nanoseconds nanoseconds(double seconds) {
  require(std::isfinite(seconds) && seconds >= 0, "a time-out is a number of seconds, 0 or more");
  return static_cast<Nanoseconds>(std::min(seconds, 1e9) * 1e9);
}

Nanoseconds timeoutOf(const smddp_group& group, double seconds) {
  const Nanoseconds own = nanoseconds(seconds);
  return own > 0 ? own : group.timeout;
}

// The memory of an operation: the last reference calls `release`.
std::shared_ptr<void> hold(void (*release)(void*), void* held) {
  if (!release) return nullptr;
  return {held, [release](void* memory) { release(memory); }};
}

engine::calls::Pieces pieces(const void* memory, int64_t bytes) {
  if (bytes == 0) return {};
  auto* first = const_cast<std::byte*>(static_cast<const std::byte*>(memory));
  return {engine::calls::Piece(std::span(first, static_cast<size_t>(bytes)))};
}

// "SUM, PRODUCT"
std::string operationsOf(smddp::DataType type) {
  std::string names;
  for (size_t op = 0; op < kOps.size(); ++op) {
    if (!engine::process::canReduce(type, static_cast<smddp::ReduceOp>(op))) continue;
    names += std::string(names.empty() ? "" : ", ") + kOps[op];
  }
  return names;
}

// Throws Usage. `input` is copied to the output where the engine works in place there.
engine::calls::Request requestOf(const smddp_group& group, const smddp_arguments& arguments) {
  require(arguments.collective >= 0 && arguments.collective < collectives::kNumCollectives,
          "there is no such collective");
  require(arguments.type >= 0 && arguments.type < smddp::kNumDataTypes, "there is no such type");
  require(arguments.op >= 0 && arguments.op < smddp::kNumReduceOps, "there is no such operation");
  require(arguments.count >= 0, "the number of elements is negative");
  const auto& spec = group.group->spec;
  engine::calls::Request request;
  request.collective = static_cast<collectives::Collective>(arguments.collective);
  request.timeout = timeoutOf(group, arguments.timeout);
  if (arguments.collective == SMDDP_BARRIER) return request;
  const auto size =
      static_cast<int64_t>(smddp::sizeOf(static_cast<smddp::DataType>(arguments.type)));
  require(arguments.count <= INT64_MAX / size / spec.size, "there are too many elements");
  request.bytes = arguments.count * size;
  if (collectives::isReduction(request.collective)) {
    request.type = static_cast<smddp::DataType>(arguments.type);
    request.op = static_cast<smddp::ReduceOp>(arguments.op);
    request.factor = arguments.factor;
    if (!engine::process::canReduce(request.type, request.op)) {
      raise(ErrorKind::Usage, "{} of {} is not supported; {} has {}",
            kOps[static_cast<size_t>(arguments.op)], toString(request.type), toString(request.type),
            operationsOf(request.type));
    }
  }
  if (collectives::hasRoot(request.collective)) {
    if (arguments.root < 0 || arguments.root >= spec.size) {
      raise(ErrorKind::Usage, "the root, {}, is no rank of a group of {}", arguments.root,
            spec.size);
    }
    request.root = arguments.root;
  }
  const collectives::Shape shape{request.collective, request.bytes, request.root};
  const auto buffers = collectives::buffersOf(shape, spec.me, spec.size);
  require(buffers.outputBytes == 0 || arguments.output, "the output is null");
  request.output = pieces(arguments.output, buffers.outputBytes);
  if (!buffers.inPlace) {
    require(buffers.inputBytes == 0 || arguments.input, "the input is null");
    // On every rank, also where the output is a later part of the input: a call is refused on all ranks, or on none.
    const auto* input = static_cast<const char*>(arguments.input);
    const auto* output = static_cast<const char*>(arguments.output);
    require(buffers.inputBytes == 0 || buffers.outputBytes == 0 ||
                input + buffers.inputBytes <= output || output + buffers.outputBytes <= input,
            "the input and the output overlap, which only allreduce, broadcast and reduce can do");
    request.input = pieces(arguments.input, buffers.inputBytes);
  } else if (arguments.input && arguments.input != arguments.output &&
             (spec.me == request.root || !collectives::hasRoot(request.collective))) {
    std::memmove(arguments.output, arguments.input, static_cast<size_t>(request.bytes));
  }
  return request;
}

smddp_status outcomeOf(const engine::calls::Completion& completion) {
  return completion.error() ? statusOf(*completion.error()) : SMDDP_OK;
}

std::unique_ptr<smddp_operation> operationOf(const smddp_group& group) {
  return std::make_unique<smddp_operation>(smddp_operation{group.engine, group.group, nullptr});
}

smddp_status beginMessage(smddp_group* group, const smddp_message* given, bool isSend,
                          smddp_operation** operation) {
  return translated([&] {
    require(given, "an argument is null");
    auto memory = hold(given->release, given->held);
    require(group && operation, "an argument is null");
    const int size = group->group->spec.size;
    const bool isAny = !isSend && given->peer == engine::calls::kAnySource;
    require(isAny || (given->peer >= 0 && given->peer < size), "the peer is no rank of the group");
    require(given->peer != group->group->spec.me, "a rank cannot send to itself");
    require(given->tag >= 0, "the tag is negative");
    require(given->bytes >= 0 && (given->bytes == 0 || given->memory), "the memory is null");
    engine::calls::Message message;
    message.send = isSend;
    message.peer = given->peer;
    message.tag = given->tag;
    message.buffer = pieces(given->memory, given->bytes);
    message.timeout = timeoutOf(*group, given->timeout);
    message.keepAlive = std::move(memory);
    auto begun = operationOf(*group);
    begun->completion = group->engine->submit(*group->group, std::move(message));
    *operation = begun.release();
    return SMDDP_OK;
  });
}

std::atomic<int (*)()> interruptCheck{nullptr};

// How long rank 0 serves the store after an error. Ranks look for notes at least twice a second.
constexpr Nanoseconds kLinger = 2'000'000'000;

void waitForAll(smddp_group& group) {
  engine::calls::Request request;  // a barrier
  request.timeout = group.timeout;
  group.engine->run(*group.group, std::move(request));
}

// Makes the group of all ranks, who meet in the store.
void meet(smddp_group& joined, const char* host, uint16_t port, Rank me, int size) {
  smddp::store::Client store(host, port, joined.timeout);
  smddp::setLogRank(me);
  const engine::groups::GroupSpec spec{"c_interface", me, size, {}};
  try {
    joined.engine = engine::sharedEngine(settings());
  } catch (const Error& error) {
    // Not settings(), which may be what is wrong.
    const smddp::Seal seal(smddp::environment("SMDDP_JOB_TOKEN"));
    smddp::bootstrap::reportTrouble(store, spec.name, me, me, seal, error);
    throw;
  }
  joined.group = joined.engine->createGroup(store, spec, joined.timeout);
  // Between the barriers no rank needs the store. After them a rank may leave, and join another job at its address.
  waitForAll(joined);
}

}  // namespace

smddp_group::~smddp_group() {
  // Does nothing after smddp_leave().
  if (!group) return;
  translated([&] {
    engine->destroyGroup(group);
    return SMDDP_OK;
  });
}

const char* smddp_error(void) { return lastError().c_str(); }

const char* smddp_version(void) { return SMDDP_VERSION; }

smddp_status smddp_join(const char* host, int port, int rank, int size, double timeout,
                        smddp_group** group) {
  return translated([&] {
    require(host && *host && group, "an argument is null or empty");
    require(port >= (size == 1 ? 0 : 1) && port <= UINT16_MAX,
            "the port is not between 1 and 65535");
    if (size < 1 || rank < 0 || rank >= size) {
      raise(ErrorKind::Usage, "rank {} is no rank of a job of {}", rank, size);
    }
    auto joined = std::make_unique<smddp_group>();
    joined->timeout = nanoseconds(timeout);
    require(joined->timeout > 0, "the time-out is 0");
    auto where = static_cast<uint16_t>(port);
    std::optional<smddp::store::Server> server;
    if (rank == 0) {
      server.emplace(host, where, joined->timeout);
      where = server->port();
    }
    try {
      meet(*joined, host, where, rank, size);
    } catch (const Interrupted&) {
      // The ranks that have come read in the store that this one was interrupted.
      if (server) server->linger(0, kLinger);
      throw;
    } catch (...) {
      // So do those that come a little later; else they would wait for a store until their time is over.
      if (server) server->linger(size, kLinger);
      throw;
    }
    server.reset();
    waitForAll(*joined);
    engine::chooseWire(*joined->engine, joined->group, joined->timeout);
    *group = joined.release();
    return SMDDP_OK;
  });
}

smddp_status smddp_split(smddp_group* parent, const int* ranks, int count, smddp_group** group) {
  return translated([&] {
    require(parent && group && count >= 0 && (ranks || count == 0), "an argument is null");
    const std::vector<Rank> members(ranks, ranks + count);
    const auto& spec = parent->group->spec;
    for (const Rank member : members) {
      if (member < 0 || member >= spec.size) {
        raise(ErrorKind::Usage, "{} is no rank of a group of {}", member, spec.size);
      }
    }
    require(std::set(members.begin(), members.end()).size() == members.size(),
            "a rank is named twice");
    *group = nullptr;
    engine::agreeOnMembers(*parent->engine, parent->group, members, parent->timeout);
    const auto me = std::ranges::find(members, spec.me);
    if (me == members.end()) return SMDDP_OK;
    auto child = std::make_unique<smddp_group>();
    child->engine = parent->engine;
    child->timeout = parent->timeout;
    child->group = engine::splitGroup(
        *parent->engine, parent->group,
        {"c_interface", static_cast<Rank>(me - members.begin()), count, spec.options}, members,
        parent->timeout);
    engine::chooseWire(*child->engine, child->group, child->timeout);
    *group = child.release();
    return SMDDP_OK;
  });
}

int smddp_rank(const smddp_group* group) { return isGiven(group) ? group->group->spec.me : -1; }

int smddp_size(const smddp_group* group) { return isGiven(group) ? group->group->spec.size : -1; }

smddp_status smddp_leave(smddp_group* group) {
  if (!group) return SMDDP_OK;
  const std::unique_ptr<smddp_group> left(group);
  const smddp_status status = translated([&] {
    left->engine->waitForOpenCalls(*left->group);
    return SMDDP_OK;
  });
  const smddp_status destroyed = translated([&] {
    left->engine->destroyGroup(left->group);
    return SMDDP_OK;
  });
  return status == SMDDP_OK ? destroyed : status;
}

smddp_status smddp_abort(smddp_group* group, const char* reason) {
  return translated([&] {
    require(group && reason, "an argument is null");
    group->engine->fail(*group->group, Error(ErrorKind::Aborted, reason));
    return SMDDP_OK;
  });
}

smddp_status smddp_begin(smddp_group* group, const smddp_arguments* arguments,
                         smddp_operation** operation) {
  return translated([&] {
    require(arguments, "an argument is null");
    auto memory = hold(arguments->release, arguments->held);
    require(group && operation, "an argument is null");
    auto request = requestOf(*group, *arguments);
    auto begun = operationOf(*group);
    // After an error the network may still read the memory, and mates may write to it.
    request.keepAlive = std::move(memory);
    begun->completion = group->engine->submit(*group->group, std::move(request));
    *operation = begun.release();
    return SMDDP_OK;
  });
}

smddp_status smddp_send(smddp_group* group, const smddp_message* message,
                        smddp_operation** operation) {
  return beginMessage(group, message, true, operation);
}

smddp_status smddp_receive(smddp_group* group, const smddp_message* message,
                           smddp_operation** operation) {
  return beginMessage(group, message, false, operation);
}

smddp_status smddp_wait(smddp_operation* operation, double seconds) {
  return translated([&] {
    require(operation, "the operation is null");
    const auto& completion = *operation->completion;
    if (completion.done()) return outcomeOf(completion);
    if (seconds < 0) {
      operation->engine->wait(*operation->group, completion);
    } else if (!operation->engine->waitFor(*operation->group, completion, nanoseconds(seconds))) {
      noteError("the operation has not ended yet");
      return SMDDP_PENDING;
    }
    return outcomeOf(completion);
  });
}

void smddp_then(smddp_operation* operation, void (*action)(void* argument), void* argument) {
  if (!isGiven(operation) || !isGiven(action)) return;
  translated([&] {
    if (operation->completion->done()) {
      action(argument);
      return SMDDP_OK;
    }
    operation->completion->then([engine = operation->engine, action, argument] {
      engine->progress().runBlocking([action, argument] { action(argument); });
    });
    return SMDDP_OK;
  });
}

int smddp_source(const smddp_operation* operation) {
  return isGiven(operation) ? operation->completion->source() : -1;
}

void smddp_free(smddp_operation* operation) { delete operation; }

smddp_status smddp_run(smddp_group* group, const smddp_arguments* arguments) {
  return translated([&] {
    require(arguments, "an argument is null");
    engine::calls::Request request;
    try {
      require(group, "an argument is null");
      request = requestOf(*group, *arguments);
    } catch (...) {
      hold(arguments->release, arguments->held);  // and releases it
      throw;
    }
    request.willWait = true;
    const auto keep = [&] {
      if (auto memory = hold(arguments->release, arguments->held)) {
        group->engine->keep(*group->group, std::move(memory));
      }
    };
    engine::calls::CompletionPtr completion;
    try {
      completion = group->engine->submit(*group->group, std::move(request));
    } catch (...) {
      keep();
      throw;
    }
    if (completion->error()) keep();
    return outcomeOf(*completion);
  });
}

void* smddp_allocate(size_t bytes) {
  void* memory = nullptr;
  translated([&] {
    memory = engine::sharedEngine(settings())->tensorMemory()->allocate(std::max<size_t>(bytes, 1));
    return SMDDP_OK;
  });
  return memory;
}

void smddp_deallocate(void* memory) {
  if (!memory) return;
  translated([&] {
    engine::sharedEngine(settings())->tensorMemory()->free(memory);
    return SMDDP_OK;
  });
}

void smddp_set_interrupt_check(int (*check)(void)) {
  interruptCheck = check;
  const smddp::InterruptCheck throwing = [] {
    const auto installed = interruptCheck.load();
    if (installed && installed() != 0) throw Interrupted();
  };
  smddp::setInterruptCheck(check ? throwing : nullptr, smddp::InterruptUser::CInterface);
}

void smddp_end(void) {
  translated([] {
    engine::shutdownSharedEngine();
    return SMDDP_OK;
  });
}
