// Fuzzes everything that is read from the store: introductions, probe reports, addresses, seals, the keys of a meeting;
// and the handles and notes of processes that meet without one.
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bootstrap/handle.h"
#include "bootstrap/lifeline_wire.h"
#include "bootstrap/note_parts.h"
#include "bootstrap/rendezvous.h"
#include "common/error.h"
#include "engine/agreement/agreement_codec.h"
#include "script.h"

namespace {

using namespace smddp;
using namespace smddp::bootstrap;
using fuzz::Script;

// Answers every call with bytes of the input.
class HostileStore final : public Store {
 public:
  explicit HostileStore(Script& script) : script_(script) {}
  void set(const std::string&, const Value&) override {}
  Value get(const std::string& key, Nanoseconds) override {
    if (script_.done()) raise(ErrorKind::Timeout, "nobody has set {}", key);
    const auto value = script_.take(script_.number<uint16_t>() % 2048);
    return {value.begin(), value.end()};
  }
  int64_t add(const std::string&, int64_t) override { return script_.number<int64_t>(); }
  bool contains(const std::string&) override { return script_.byte() % 2 != 0; }

 private:
  Script& script_;
};

// An accepted introduction must be usable, and must be serialised without an error.
void introductions(Script& script) {
  const auto blob = script.rest();
  const Introduction parsed = parseIntroduction(blob, 1);
  const auto again = serialise(parsed);
  if (!std::equal(again.begin(), again.end(), blob.begin(), blob.end())) std::abort();
  Introduction mine = introduceThisProcess(Settings(), ProcessId{});
  (void)needsProbing({mine, parsed});
  (void)decideLocality({mine, parsed}, {{}, {{{0, "why"}}}}, 0);
  Introduction mate = parsed;
  mate.processId.front() ^= std::byte{1};
  const bool isExhausted = parsed.slab.size() % 2 != 0;
  (void)decideLocality({mate, parsed}, {{}, {{{0, "why", isExhausted}}}}, 0);
  (void)decideLocality({mate, parsed}, {{}, {}}, 0);
  checkAgreement({mate, parsed});
  checkAgreement(mate, parsed);
  // Half of them expect a group of another size.
  if (parsed.pid % 2 == 0) mine.groupSize = parsed.groupSize;
  checkAgreement({mine, parsed});
}

void meeting(Script& script) {
  const int size = 1 + script.byte() % 4;
  const Rank me = script.byte() % size;
  const Seal seal(script.byte() % 2 != 0 ? "token" : "");
  HostileStore store(script);
  Rendezvous rendezvous(store, "g", me, size, 0, seal);
  const auto introductions = rendezvous.exchange(introduceThisProcess(Settings(), ProcessId{}));
  if (introductions.size() != static_cast<size_t>(size)) std::abort();
  const auto probe = [&](const Introduction&, std::string*) {
    switch (script.byte() % 4) {
      case 0: return false;
      case 1: raise(ErrorKind::Resource, "no memory");
      case 2: throw std::runtime_error("why");
      default: return true;
    }
  };
  (void)rendezvous.agreeOnNodes(introductions, probe);
}

void greeting(Script& script) {
  std::vector<std::byte> bytes(kHelloBytes);
  const auto given = script.take(bytes.size());
  std::copy(given.begin(), given.end(), bytes.begin());
  const auto hello = parseHello(bytes);
  // Nobody can sign without the token.
  if (hello && isGenuine(*hello, Seal("not in any corpus: 93b1"))) std::abort();
}

void seals(Script& script) {
  const auto bytes = script.rest();
  std::vector<std::byte> sealed(bytes.begin(), bytes.end());
  if (Seal("not in any corpus: 93b1").open("a key", sealed) == Seal::Verdict::Good) std::abort();
  if (sealed.size() > bytes.size()) std::abort();
}

// An accepted handle is printed as it came.
void handles(Script& script) {
  const auto bytes = script.rest();
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::vector<Handle> parsed{parseHandle(text, Seal())};
  const std::string again = textOf(parsed.front(), Seal());
  if (again != text && textOf(parseHandle(again, Seal()), Seal()) != again) std::abort();
  parsed.push_back(parsed.front());
  sortHandles(parsed);
  (void)digestOf(parsed);
}

// So is a note.
void notes(Script& script) {
  const auto blob = script.rest();
  const auto again = serialise(parseNote(blob));
  if (!std::equal(again.begin(), again.end(), blob.begin(), blob.end())) std::abort();
}

// What was put together comes apart into the parts of which it was made.
void parts(Script& script) {
  NoteParts joined;
  while (script.left() > 0) {
    const bool isFirst = script.byte() % 2 == 0;
    const auto part = script.piece();
    const auto note = joined.add(isFirst ? &joined : nullptr, part);
    if (!note) continue;
    NoteParts again;
    std::optional<Note> same;
    for (const auto& each : partsOf(note->topic, 7, note->bytes, 64))
      same = again.add(nullptr, each);
    if (!same || same->topic != note->topic || same->bytes != note->bytes) std::abort();
  }
}

void agreements(Script& script) {
  namespace agreement = smddp::engine::agreement;
  const auto [from, message] = agreement::parseMessage(script.rest());
  const auto bytes = agreement::serialise(from, message);
  const auto again = agreement::parseMessage(bytes);
  if (again.first != from || agreement::serialise(from, again.second) != bytes) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Script script(data, size);
  try {
    switch (script.byte()) {
      case 0: introductions(script); break;
      case 1: (void)parseProbeReport(script.rest(), 1, 4); break;
      case 2: (void)serialise(parseLifelineAddress(script.rest(), "a peer")); break;
      case 3: greeting(script); break;
      case 4: seals(script); break;
      case 5: handles(script); break;
      case 6: notes(script); break;
      case 7: parts(script); break;
      case 8: agreements(script); break;
      default: meeting(script);
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Internal) std::abort();
  }
  return 0;
}
