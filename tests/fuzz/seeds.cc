// Writes the initial corpus of the fuzzers. The code itself makes it, so that it always has the present version:
//   fuzz_seeds <folder>   makes <folder>/<fuzzer>/<name>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/blob.h"
#include "bootstrap/handle.h"
#include "bootstrap/introduction.h"
#include "bootstrap/lifeline_wire.h"
#include "bootstrap/locality.h"
#include "bootstrap/note_parts.h"
#include "engine/agreement/agreement_codec.h"
#include "engine/team/blame.h"
#include "process_group/message_front.h"
#include "store/frames.h"
#include "transport/tcp/frames.h"
#include "transport/wire.h"
#if SMDDP_HAVE_LIBFABRIC
#include "transport/fabric/wire.h"
#endif

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

void add(Blob& blob, const Blob& more) { blob.insert(blob.end(), more.begin(), more.end()); }

template <typename Message>
Message ofKind(Message message, uint8_t kind) {
  message.header.kind = kind;
  return message;
}

void bootstrapSeeds() {
  using namespace bootstrap;
  Introduction introduction = introduceThisProcess(Settings(), ProcessId{std::byte{7}});
  introduction.host = "host";
  introduction.pid = 1;
  introduction.settings = "SMDDP_CHUNK_BYTES=4096\nSMDDP_ALGORITHM=allreduce=ring\n";
  introduction.slab.resize(40);
  introduction.groupSize = 2;
  const auto blob = serialise(introduction);
  write("bootstrap_fuzz", "introduction", behind({0}, blob));
  write("bootstrap_fuzz", "report", behind({1}, serialise(ProbeReport{{{2, "no memory"}}})));
  const LifelineAddress address{parseNumericAddress("127.0.0.1"), ProcessId{std::byte{1}}};
  write("bootstrap_fuzz", "address", behind({2}, serialise(address)));
  const LifelineAddress longer{parseNumericAddress("::1"), ProcessId{std::byte{1}}};
  write("bootstrap_fuzz", "address6", behind({2}, serialise(longer)));
  const Hello hello = signedHello(ProcessId{std::byte{1}}, ProcessId{std::byte{200}}, Seal());
  write("bootstrap_fuzz", "hello", behind({3}, serialise(hello)));
  const std::string handle = textOf({introduction, 7, 1, 2}, Seal());
  write("bootstrap_fuzz", "handle", behind({5}, std::as_bytes(std::span(handle))));
  MeetingNote meets{.uuid = 3, .digest = 4, .round = 1, .entry = blob};
  meets.entry.resize(32);
  write("bootstrap_fuzz", "entry", behind({6}, serialise(meets)));
  meets.text = "rank 1 cannot take part";
  write("bootstrap_fuzz", "refusal", behind({6}, serialise(meets)));
  Blob parts;
  for (const Blob& part : partsOf(1, 2, std::as_bytes(std::span("a note in parts")), 20)) {
    parts.push_back(std::byte{0});
    parts.push_back(static_cast<std::byte>(part.size()));
    parts.insert(parts.end(), part.begin(), part.end());
  }
  write("bootstrap_fuzz", "parts", behind({7}, parts));
  namespace agreement = smddp::engine::agreement;
  agreement::Message promise{.kind = agreement::Message::Kind::Promise,
                             .generation = 3,
                             .ballot = {4, 5},
                             .suspects = {{6, agreement::Suspicion::Dead}},
                             .newcomers = {{7, "a card"}},
                             .committed = 8,
                             .voted = 9};
  promise.decided = {4, {{5, "another card"}}, 9};
  write("bootstrap_fuzz", "promise", behind({8}, agreement::serialise(5, promise)));
  write("bootstrap_fuzz", "seal", behind({4}, Seal("token").close("a key", blob)));
  // What two ranks publish, as the store returns it: without a seal, behind its length.
  const auto values = [](std::initializer_list<Blob> blobs) {
    Blob all;
    for (const Blob& one : blobs) {
      const Blob sealed = Seal().close("", one);
      const auto length = static_cast<int>(sealed.size());
      add(all, behind({length & 255, length >> 8}, sealed));
    }
    return all;
  };
  // The answers to two questions whether the store has a key.
  const Blob bothThere = behind({1, 1}, {});
  // Rank 0 of two, no token; epoch 1; nothing is closed; no note; two introductions.
  const Blob begin = behind({5, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, {});
  Blob meeting = begin;
  meeting.push_back(std::byte{0});
  add(meeting, bothThere);
  Blob agreed = meeting;
  add(meeting, values({blob, blob}));
  write("bootstrap_fuzz", "meeting", meeting);
  // A note of rank 1, and one of this rank, which takes it back.
  for (const int writer : {1, 0}) {
    BlobWriter note;
    note.number(static_cast<uint32_t>(writer));
    note.number(static_cast<uint8_t>(ErrorKind::Usage));
    note.text("text", "cannot take part", 1024);
    Blob noted = begin;
    noted.push_back(std::byte{1});
    add(noted, values({note.take()}));
    add(noted, bothThere);
    write("bootstrap_fuzz", fmt::format("note{}", writer), noted);
  }
  // They agree, and tell whom they cannot reach. The same for rank 1, after an epoch that was superseded by the next.
  introduction.settings.clear();
  const Blob plain = serialise(introduction);
  // Ranks of one node that know each other, that share a name the user has chosen, and that are the same process.
  introduction.nodeAgreement = 5;
  write("bootstrap_fuzz", "acquainted", behind({0}, serialise(introduction)));
  introduction.nodeName = "id:chosen";
  introduction.nodeAgreement = 0;
  write("bootstrap_fuzz", "chosen", behind({0}, serialise(introduction)));
  introduction.processId = ProcessId{};
  introduction.pid = 2;
  write("bootstrap_fuzz", "twin", behind({0}, serialise(introduction)));
  Blob rest = values({plain, plain});
  rest.push_back(std::byte{3});
  add(rest, bothThere);
  add(rest, values({serialise(ProbeReport{{{1, "no memory"}}}), serialise(ProbeReport{})}));
  add(agreed, rest);
  write("bootstrap_fuzz", "nodes", agreed);
  const auto text = [](std::string_view value) {
    return behind({static_cast<int>(value.size()), 0}, std::as_bytes(std::span(value)));
  };
  Blob late = behind({5, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, {});
  for (const std::string_view value : {"superseded", "2", "complete"}) {
    if (value == "complete") late.push_back(std::byte{0});
    late.push_back(std::byte{1});
    add(late, text(value));
  }
  add(late, bothThere);
  add(late, rest);
  write("bootstrap_fuzz", "late", late);
  // Introduce number 1; a connection; the hello; a poll; the goodbye.
  Blob visit = behind({0, 1, 0, 3, 5, static_cast<int>(kHelloBytes)}, serialise(hello));
  for (const int byte : {3, 5, 1, 0x67, 3}) visit.push_back(static_cast<std::byte>(byte));
  write("lifeline_fuzz", "visit", visit);
  // The same, but it is introduced after the hello.
  Blob early = behind({0, 0, 3, 5, static_cast<int>(kHelloBytes)}, serialise(hello));
  for (const int byte : {3, 1, 3, 5, 1, 0x67, 3}) early.push_back(static_cast<std::byte>(byte));
  write("lifeline_fuzz", "early", early);
  // Be connected to; the hello; a probe, an echo, and that it gave us up.
  const Hello answer = signedHello(ProcessId{std::byte{201}}, ProcessId{std::byte{200}}, Seal());
  Blob dial = behind({0, 4, 3, 5, static_cast<int>(kHelloBytes)}, serialise(answer));
  for (const int byte : {3, 5, 1, 0x70, 3, 5, 1, 0x65, 3, 5, 1, 0x75, 3}) {
    dial.push_back(static_cast<std::byte>(byte));
  }
  write("lifeline_fuzz", "dial", dial);
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
  Blob twice = message(open);
  add(twice, message(open));
  write("wire_fuzz", "twice", twice);
  // The parsers get all of an input: a message, and one that asks for too much.
  write("wire_fuzz", "whole_open", behind({}, bytesOf(open)));
  OpenMessage wide = open;
  wide.window = kMaxWindow + 1;
  write("wire_fuzz", "whole_wide", behind({}, bytesOf(wide)));
  write("wire_fuzz", "whole_abort", makeAbort(1, 1, "3a reason"));
  // Puts of the messages 1 to 4: the channel grants as many again.
  Blob puts;
  for (const int number : {1, 2, 3, 4}) add(puts, behind({241, 0, 0, 0, 0, 0, 0, 0, number}, {}));
  write("wire_fuzz", "puts", puts);
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
    if (kind == 0) {
      // The message lies in the first slot.
      PutHeader put;
      put.length = 16;
      put.group = put.number = 1;
      add(talk, behind({3, sizeof put}, bytesOf(put)));
      add(talk, behind({0, 0, 4}, bytesOf(makeImmediate(0, 1))));
    } else {
      add(talk, behind({6, sizeof open}, bytesOf(open)));
      talk.push_back(std::byte{2});
      add(talk, behind({6, sizeof grant}, bytesOf(grant)));
    }
    talk.push_back(std::byte{2});
    if (kind == 0) {
      // One byte more than announced; the header's length stands behind its magic.
      Blob longer = talk;
      longer.at(4 + sizeof offer + 1 + 2 + 4) = std::byte{17};
      write("matcher_fuzz", "longer", longer);
    }
    write("matcher_fuzz", kind == 0 ? "announce" : "accept", talk);
  }
  // A short message into the buffer of 16 bytes, and one into another of 4.
  offer.header.kind = kFirstEngineKind + 4;
  offer.bytes = 4;
  Blob buffered = behind({1, 4, 6, sizeof offer + 4}, bytesOf(offer));
  add(buffered, behind({1, 2, 3, 4, 129, 4, 6, sizeof offer + 4}, bytesOf(offer)));
  add(buffered, behind({1, 2, 3, 4, 2}, {}));
  write("matcher_fuzz", "buffered", buffered);
  // A send that is longer than the slots; one for which there is no room.
  offer.header.kind = kFirstEngineKind + 1;
  open.slotBytes = 8;
  Blob full = behind({0, 16, 6, sizeof open}, bytesOf(open));
  add(full, behind({6, sizeof offer}, bytesOf(offer)));
  full.push_back(std::byte{2});
  write("matcher_fuzz", "slots", full);
  open.slotBytes = 64;
  full = behind({0, 16, 6, sizeof open}, bytesOf(open));
  add(full, behind({6, sizeof offer}, bytesOf(offer)));
  add(full, behind({194, 194, 2, 2}, {}));
  write("matcher_fuzz", "room", full);
  const Blob zeros(64);
  write("memory_fuzz", "rings", behind({1, 3, 0, 4, 1, 2, 3, 2, 0, 0, 3, 2, 2, 2}, zeros));
  // A record that is longer than a control message may be.
  write("memory_fuzz", "long",
        behind({1, 3, 0, 8, 1, 0, 0, 0, 0xD0, 7, 0, 0, 0, 0, 3, 2, 255, 2}, {}));
  // The mate's process has left; it has died.
  write("memory_fuzz", "left", behind({1, 3, 5, 1, 0, 0, 0, 2}, {}));
  write("memory_fuzz", "died", behind({1, 3, 5, 2, 0, 0, 0, 2}, {}));
  const Blob record = behind({1, 0, 0, 0, 8}, Blob(11));  // RecordHeader: a control message
  Blob ring = behind({1, 3, 0, 16}, record);
  add(ring, behind({0, 0, 3, 2, 2, 2}, {}));
  write("memory_fuzz", "record", ring);
  write("memory_fuzz", "location", behind({0}, zeros));
  write("memory_fuzz", "address", behind({3, 8, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1}, zeros));
}

#if SMDDP_HAVE_LIBFABRIC
void fabricSeeds() {
  using namespace transport;
  const Blob zeros(64);
  const fabric::Address address{7, fabric::Protocol::Send, "tcp", Blob(16)};
  write("fabric_fuzz", "address", behind({0}, encode(address)));
  write("fabric_fuzz", "order", behind({1, 0, 3, 0, 4, 1, 2, 3, 4, 1}, zeros));
  // More messages of a sender that is introduced late than are kept.
  Blob flood{std::byte{1}};
  for (int i = 0; i < 258; ++i) add(flood, behind({3, i % 256, 0}, {}));
  add(flood, behind({0, 1, 3, 0, 0}, {}));
  write("fabric_fuzz", "flood", flood);
  // The two fragments of a put of 100 bytes.
  fabric::FragmentHeader fragment{};
  fragment.totalBytes = 100;
  Blob put{std::byte{2}};
  for (const int piece : {60, 40}) {
    add(put, behind({}, bytesOf(fragment)));
    add(put, behind({1, 0, piece}, Blob(static_cast<size_t>(piece))));
    fragment.offset = 60;
  }
  write("fabric_fuzz", "puts", put);
}
#endif

void tcpSeeds() {
  using namespace transport;
  write("tcp_fuzz", "address", behind({0}, encode(tcp::Address{7, "127.0.0.1", 4096})));
  // A connection after its Hello: a control message of 4 bytes, then a put at byte 8, in two parts.
  const tcp::FrameHeader frame{.length = 4};
  Blob control = behind({0, sizeof frame + 4}, bytesOf(frame));
  add(control, behind({1, 2, 3, 4}, {}));
  Blob talk = behind({1, 0}, control);
  add(talk, behind({1, 5, 100, 8, 80}, Blob(80)));
  constexpr int kRest = kHeaderBytes + 100 - 80;
  add(talk, behind({0, kRest}, Blob(kRest)));
  write("tcp_fuzz", "talk", talk);
  // The Hello first.
  Blob greeted = behind({1, 1, 0, sizeof(tcp::Hello)}, bytesOf(tcp::Hello{}));
  add(greeted, control);
  write("tcp_fuzz", "hello", greeted);
  // A control message that is too long; a kind that there is not.
  tcp::FrameHeader wrong{.length = kMaxControlBytes + 1};
  write("tcp_fuzz", "long", behind({1, 0, 0, sizeof wrong}, bytesOf(wrong)));
  wrong.kind = static_cast<tcp::FrameKind>(2);
  write("tcp_fuzz", "kind", behind({1, 0, 0, sizeof wrong}, bytesOf(wrong)));
}

void stripedSeeds() {
  using namespace transport;
  // A peer with two cards; its memory under the key of each; puts there.
  const RemoteKey keys[] = {{0, 1}, {0, 2}};
  Blob cards = behind({0, 6, 1, 0, 7, 1, 0, 8, 9, sizeof keys}, std::as_bytes(std::span(keys)));
  for (const int byte : {3, 1, 3, 1, 3, 5, 2}) cards.push_back(static_cast<std::byte>(byte));
  write("striped_fuzz", "cards", cards);
  // It announces the key of one card only.
  Blob few = behind({0, 6, 1, 0, 7, 1, 0, 8, 9, sizeof keys[0]}, bytesOf(keys[0]));
  add(few, behind({3, 1, 3, 1}, {}));
  write("striped_fuzz", "few", few);
}

void engineSeeds() {
  using namespace transport;
  using namespace engine::team;
  // Makes a control message from rank 2, with our group in it.
  const auto control = [](const auto& message) {
    return behind({2, 1, sizeof message}, bytesOf(message));
  };
  struct {
    ControlHeader header{.kind = kFirstEngineKind};
    uint64_t group = 0, id = 1, tag = 0, bytes = 16;
  } offer;
  // A receive of 16 bytes, which rank 2 announces and puts into the first slot.
  PutHeader put;
  put.length = 16;
  put.group = 0x9e3779b97f4a7c14;  // the first group of a process with the id 1
  put.number = 1;
  Blob messages = behind({0, 0, 16, 0}, {});
  add(messages, control(offer));
  add(messages, behind({15, 5, sizeof put}, bytesOf(put)));
  add(messages, behind({0, 0, 3}, bytesOf(makeImmediate(0, 1))));
  add(messages, behind({15, 15}, {}));
  write("engine_fuzz", "receive", messages);
  // A send to rank 2, which accepts it and opens a channel.
  offer.header.kind = kFirstEngineKind + 1;
  OpenMessage open;
  open.destination = 2;
  open.track = 255;
  open.window = 4;
  open.slotBytes = 4096;
  Blob send = behind({0, 128, 16, 0}, {});
  add(send, control(offer));
  add(send, control(open));
  add(send, behind({15, 15}, {}));
  write("engine_fuzz", "send", send);
  // A barrier that rank 2 does not take part in. It asks, blames rank 1, and gives up.
  InquiryMessage inquiry;
  inquiry.sequence = 1;
  AnswerMessage answer;
  answer.blame = Blame{1, Blame::Why::Silent, 0}.pack();
  struct {
    AbortMessage message;
    uint32_t kind = 3;
    int32_t lost = 2, noticedBy = 1;
    char text[4] = {'w', 'h', 'y', '.'};
  } abort;
  Blob barrier = behind({0, 1, 8, 15, 7, 0, 4}, {});
  add(barrier, control(answer));
  LeftMessage goodbye;
  goodbye.calls = 1;
  add(barrier, control(goodbye));
  const Blob trouble = makeTrouble(0, {1, "why."});
  add(barrier, behind({2, 1, static_cast<int>(trouble.size())}, trouble));
  // It asks about messages, and about a call that this rank has not made.
  for (const uint64_t sequence : {0, 2}) {
    inquiry.sequence = sequence;
    add(barrier, control(inquiry));
  }
  add(barrier, behind({7, 0, 4}, {}));
  // Its call is another one than this rank's.
  Blob differs = barrier;
  inquiry.sequence = 1;
  add(differs, control(inquiry));
  write("engine_fuzz", "differs", differs);
  Blob broken = barrier;
  add(broken, control(abort));
  add(broken, control(inquiry));
  abort.lost = 0;
  Blob givenUp = behind({0, 1, 8, 15}, {});
  add(givenUp, control(abort));
  write("engine_fuzz", "given_up", givenUp);
  // What comes after the group has been left, and when it is gone.
  Blob left = behind({0, 11}, {});
  add(left, control(answer));
  add(left, control(open));
  write("engine_fuzz", "left", left);
  Blob gone = behind({0, 12, 11, 27}, {});
  add(gone, control(inquiry));
  write("engine_fuzz", "gone", gone);
  // Then its connection ends.
  add(barrier, behind({9, 7, 0, 4}, {}));
  write("engine_fuzz", "barrier", barrier);
  // It blames itself for each reason until the time is over; then a rank that the group does not have. Its reason for a
  // break ends too early.
  const auto blaming = [&](const std::string& name, const Blame& blame) {
    answer.blame = blame.pack();
    // After 0.9 s comes the answer, after 1.1 s the time-out.
    Blob late = behind({0, 1, 8, 15, 7, 0, 4, 7, 0x40, 0x1F}, {});
    add(late, control(answer));
    add(late, behind({7, 0xD0, 7}, {}));
    write("engine_fuzz", name, late);
  };
  using Why = Blame::Why;
  for (const Why why :
       {Why::Unknown, Why::NotCalled, Why::Stopped, Why::Silent, Why::Unreachable}) {
    blaming("why" + std::to_string(static_cast<int>(why)), {2, why, 0});
  }
  blaming("nobody", {5, Why::Silent, 0});
  Blob cut = behind({0, 1, 15}, {});
  add(cut,
      behind({2, 1, sizeof(AbortMessage) + 3}, bytesOf(abort).first(sizeof(AbortMessage) + 3)));
  write("engine_fuzz", "cut", cut);
  write("engine_fuzz", "abort", broken);
  // Long and short collectives in which the mate takes part for a while, then writes into the head of its region.
  for (const int call : {0x01, 0x11, 0x21, 0x31, 0xA1, 0xB1}) {
    // The memory of tensors may be shared, from 128 on.
    Blob calls =
        behind({call < 128 ? 0 : 64, call, call, 15, 8, 15, 8, 15, 6, 12}, Blob(12, std::byte{1}));
    add(calls, behind({8, 0, 7, 0, 1, 15, 6, 4, 1, 2, 3, 4, 64, 0, 15}, {}));
    write("engine_fuzz", "call" + std::to_string(call), calls);
  }
  // A zero-copy collective.
  write("engine_fuzz", "shared",
        behind({64 + 128, 0xA1, 15, 8, 0xB1, 15, 8, 15, 8, 15, 8, 15, 8, 15, 8, 15}, {}));
  // Several calls at once, which both ranks of the node could join to one. What rank 2 sends before it is known.
  write("engine_fuzz", "fused",
        behind({128, 33, 33, 33, 33, 33, 33, 33, 33, 15, 8, 15, 8, 15, 8, 15}, {}));
  Blob early = behind({32}, control(answer));
  early.erase(early.begin() + 1);
  write("engine_fuzz", "early", early);
  const Blob zeros(40);
  write("engine_fuzz", "entries", behind({6, 32}, zeros));
}

void storeSeeds() {
  using namespace store;
  const auto requests = {Request{RequestKind::Set, {"key"}, Blob(20)},
                         Request{RequestKind::Add, {"sum"}, Blob(8)},
                         Request{RequestKind::Get, {"key", "key"}, {}},
                         Request{RequestKind::Check, {"key", "no"}, {}}};
  Blob all;
  for (const Request& request : requests) {
    const Blob frame = serialise(request);
    const auto kind = std::to_string(static_cast<int>(request.kind));
    write("store_fuzz", "request" + kind, behind({2, 0}, std::span(frame).subspan(kLengthBytes)));
    add(all, behind({static_cast<int>(frame.size())}, frame));
  }
  write("store_fuzz", "session", behind({0, 0}, all));
  write("store_fuzz", "open_session", behind({0, 1}, all));
  // An amount that is too short to be a number.
  const Blob amount = serialise(Request{RequestKind::Add, {"sum"}, Blob(3)});
  write("store_fuzz", "short_amount",
        behind({0, 0, static_cast<int>(amount.size())}, std::span(amount)));
  write("store_fuzz", "too_long", behind({0, 0, 5, 255, 255, 255, 255, 0}, {}));
  bootstrap::BlobWriter values;
  appendValue(values, Blob(5));
  appendValue(values, Blob(7));
  const Blob two = values.take();
  write("store_fuzz", "values", behind({2, 2}, two));
  // A value that claims a byte more than there is.
  Blob cut = two;
  cut.pop_back();
  write("store_fuzz", "cut_values", behind({2, 2}, cut));
  for (const int call : {0, 1, 2, 3}) {
    const Blob sum(8);
    const Blob reply = replyWith(true, call == 1 ? sum : two);
    write("store_fuzz", "reply" + std::to_string(call), behind({1, call}, reply));
  }
  write("store_fuzz", "no_reply", behind({1, 2, 0, 0, 0, 0}, {}));
}

void messageSeeds() {
  using process_group::TensorHead;
  bootstrap::BlobWriter tensors;
  const auto head = [&](TensorHead::Kind kind, int type, size_t dimensions) {
    tensors.raw(behind({kind, type, 1, static_cast<int>(dimensions)}, {}));
  };
  const auto dense = [&](TensorHead::Kind kind, std::vector<uint64_t> sizes) {
    head(kind, 6, sizes.size());
    for (const uint64_t size : sizes) tensors.number(size);
    for (size_t d = 0; d < sizes.size(); ++d) tensors.number(static_cast<uint8_t>(d));
  };
  const auto save = [&](const std::string& name, uint32_t count) {
    const Blob described = tensors.take();
    bootstrap::BlobWriter front;
    for (const uint32_t number : {3u, count, 19 + static_cast<uint32_t>(described.size()), 1u}) {
      front.number(number);
    }
    front.raw(Blob(3));
    front.raw(described);
    write("message_fuzz", name, front.take());
    tensors = {};
  };
  head(TensorHead::None, 0, 0);
  dense(TensorHead::Small, {2, 3});
  tensors.raw(Blob(2 * 3 * 2));  // two bytes each, for the fuzzer's type 6
  dense(TensorHead::Large, {1 << 20, 0, 1});
  save("dense", 3);
  for (const int layout : {1, 2}) {
    head(TensorHead::Sparse, 6, 1);
    tensors.number(uint64_t{9});
    tensors.raw(behind({layout, 1}, {}));
    for (int part = 0; part < layout + 1; ++part) dense(TensorHead::Large, {5});
    save("sparse" + std::to_string(layout), 1);
  }
  // Bytes that no number holds, elements beyond the end, and a dimension that comes twice.
  dense(TensorHead::Large, {uint64_t{1} << 40, uint64_t{1} << 40});
  save("overflow", 1);
  dense(TensorHead::Small, {2, 3});
  tensors.raw(Blob(11));
  save("cut", 1);
  head(TensorHead::Large, 6, 2);
  tensors.raw(Blob(18));
  save("twice", 1);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 1;
  folder = arguments[1];
  bootstrapSeeds();
  transportSeeds();
#if SMDDP_HAVE_LIBFABRIC
  fabricSeeds();
#endif
  tcpSeeds();
  stripedSeeds();
  engineSeeds();
  storeSeeds();
  messageSeeds();
  return 0;
}
