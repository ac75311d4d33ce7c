// Writes the initial corpus of the fuzzers. The code itself makes it, so that it always has the present version:
//   fuzz_seeds <folder>   makes <folder>/<fuzzer>/<name>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "bootstrap/introduction.h"
#include "bootstrap/lifeline_wire.h"
#include "bootstrap/locality.h"
#include "transport/wire.h"

namespace {

using namespace smddp;
using Blob = std::vector<std::byte>;

std::filesystem::path folder;

Blob behind(std::initializer_list<int> head, std::span<const std::byte> bytes) {
  Blob blob;
  for (const int byte : head) blob.push_back(static_cast<std::byte>(byte));
  blob.insert(blob.end(), bytes.begin(), bytes.end());
  return blob;
}

void write(const std::string& fuzzer, const std::string& name, const Blob& blob) {
  std::filesystem::create_directories(folder / fuzzer);
  std::ofstream file(folder / fuzzer / name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(blob.data()), static_cast<std::streamsize>(blob.size()));
}

template <typename Message>
Message ofKind(Message message, uint8_t kind) {
  message.header.kind = kind;
  return message;
}

void bootstrapSeeds() {
  using namespace bootstrap;
  Introduction introduction = introduceThisProcess(Settings(), ProcessId{std::byte{7}});
  introduction.host = "host";
  introduction.settings = "SMDDP_CHUNK_BYTES=4096\nSMDDP_ALGORITHM=allreduce=ring\n";
  introduction.slab.resize(40);
  const auto blob = serialise(introduction);
  write("bootstrap_fuzz", "introduction", behind({0}, blob));
  write("bootstrap_fuzz", "report", behind({1}, serialise(ProbeReport{{{2, "no memory"}}})));
  const LifelineAddress address{parseNumericAddress("127.0.0.1"), ProcessId{std::byte{1}}};
  write("bootstrap_fuzz", "address", behind({2}, serialise(address)));
  const Hello hello = signedHello(ProcessId{std::byte{1}}, ProcessId{std::byte{200}}, Seal());
  write("bootstrap_fuzz", "hello", behind({3}, serialise(hello)));
  write("bootstrap_fuzz", "seal", behind({4}, Seal("token").close("a key", blob)));
  // Rank 0 of two, no token; epoch 1; nothing closed; two introductions without a seal.
  Blob meeting = behind({5, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, {});
  for (int i = 0; i < 2; ++i) {
    const auto sealed = behind({}, Seal().close("", blob));
    const auto length = static_cast<int>(sealed.size());
    const Blob value = behind({length & 255, length >> 8}, sealed);
    meeting.insert(meeting.end(), value.begin(), value.end());
  }
  write("bootstrap_fuzz", "meeting", meeting);
  // Introduce number 1; a connection; the hello; a poll; the goodbye.
  Blob visit = behind({0, 1, 0, 3, 4, static_cast<int>(kHelloBytes)}, serialise(hello));
  for (const int byte : {3, 4, 1, 0x67, 3}) visit.push_back(static_cast<std::byte>(byte));
  write("lifeline_fuzz", "visit", visit);
}

void transportSeeds() {
  using namespace transport;
  const auto message = [](const auto& value) {
    return behind({static_cast<int>(sizeof value)}, bytesOf(value));
  };
  OpenMessage open;
  open.group = 1;
  open.destination = 1;
  open.window = 4;
  open.slotBytes = 64;
  GrantMessage grant;
  grant.group = 1;
  grant.released = 1;
  CloseMessage close;
  close.group = 1;
  write("wire_fuzz", "open", message(open));
  write("wire_fuzz", "grant", message(grant));
  write("wire_fuzz", "close", message(close));
  const Blob abort = makeAbort(1, 1, "3a reason");
  write("wire_fuzz", "abort", behind({static_cast<int>(abort.size())}, abort));
  // A send and a receive, then messages of the other end; the matcher's messages have 40 bytes.
  struct {
    ControlHeader header;
    uint64_t group = 1, id = 1, tag = 0, bytes = 16;
  } offer;
  for (const int kind : {0, 1}) {
    offer.header.kind = static_cast<uint8_t>(kFirstEngineKind + kind);
    Blob talk = behind({kind == 0 ? 1 : 0, 16, 6, sizeof offer}, bytesOf(offer));
    talk.push_back(std::byte{2});
    write("matcher_fuzz", kind == 0 ? "announce" : "accept", talk);
  }
  const Blob zeros(64);
  write("fabric_fuzz", "order", behind({1, 0, 3, 0, 4, 1, 2, 3, 4, 1}, zeros));
  write("fabric_fuzz", "puts", behind({2}, zeros));
  write("memory_fuzz", "rings", behind({1, 3, 0, 4, 1, 2, 3, 2, 0, 0, 3, 2, 2, 2}, zeros));
  write("memory_fuzz", "location", behind({0}, zeros));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 1;
  folder = arguments[1];
  bootstrapSeeds();
  transportSeeds();
  return 0;
}
