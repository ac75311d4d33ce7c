#include "common/printable.h"

#include <gtest/gtest.h>

#include "common/error.h"

namespace smddp {
namespace {

TEST(Printable, GoodTextStays) {
  for (const char* text :
       {"", "rank 3 (node7, pid 4711)", "line\n\tline", "Zürich", "節點", "🙂"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, WhatTerminalsObeyAndWhatIsNoTextIsReplaced) {
  EXPECT_EQ(printable("\x1b[2Jhost\r"), "?[2Jhost?");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a?b");
  EXPECT_EQ(printable("\x7f\xc2\x9b"), "???");
  EXPECT_EQ(printable("\xff\xfe\x80"), "???");
  EXPECT_EQ(printable("\xc0\xaf"), "??") << "overlong";
  EXPECT_EQ(printable("\xe0\x9f\xbf"), "???") << "overlong";
  EXPECT_EQ(printable("\xed\xa0\x80"), "???") << "a surrogate";
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "????") << "beyond Unicode";
}

TEST(Printable, ACutCharacterIsReplaced) {
  const std::string whole = "Z\xc3\xbcrich \xf0\x9f\x99\x82";
  for (size_t length = 0; length <= whole.size(); ++length) {
    const std::string cut = printable(std::string_view(whole).substr(0, length));
    EXPECT_EQ(cut.size(), length);
    EXPECT_EQ(printable(cut), cut);
  }
  EXPECT_EQ(printable(std::string_view(whole).substr(0, 2)), "Z?");
}

TEST(Error, SaysNothingThatIsNotPrintable) {
  try {
    raise(ErrorKind::PeerLost, "rank 1 ({}) is gone", "\x1b]0;host\xff");
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 1 (?]0;host?) is gone");
  }
}

}  // namespace
}  // namespace smddp
