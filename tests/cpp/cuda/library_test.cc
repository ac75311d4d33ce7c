#include "cuda/library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/error.h"

namespace smddp::cuda {
namespace {

using testing::HasSubstr;

std::string refusalOf(const std::string& path) {
  try {
    loadLibrary(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Resource);
    return error.what();
  }
  return "";
}

TEST(Library, ThatIsMissingIsNamed) {
  EXPECT_THAT(refusalOf(""), HasSubstr("built without its CUDA part"));
  EXPECT_THAT(refusalOf("/nowhere/libsmddp_cuda.so"), HasSubstr("/nowhere/libsmddp_cuda.so"));
}

TEST(Library, OfAnotherBuildIsRefused) {
  const std::string said = refusalOf(SMDDP_TEST_OTHER_VERSION_PATH);
  EXPECT_THAT(said, HasSubstr("belongs to another smddp"));
  EXPECT_THAT(said, HasSubstr(fmt::format("version {}", kTableVersion + 1)));
  // A failure is not remembered.
  EXPECT_EQ(refusalOf(SMDDP_TEST_OTHER_VERSION_PATH), said);
}

TEST(Library, OfSomethingElseIsRefused) {
  EXPECT_THAT(refusalOf(SMDDP_TEST_FOREIGN_PATH), HasSubstr("no CUDA part of smddp"));
}

// Loading it needs no GPU, only using it does.
TEST(Library, ThatWasBuiltHereFits) {
  const std::string path = SMDDP_TEST_CUDA_PART;
  if (path.empty()) GTEST_SKIP() << "built without nvcc";
  const DeviceTable& table = loadLibrary(path);
  EXPECT_STREQ(table.release, SMDDP_VERSION);
  EXPECT_EQ(&loadLibrary(path), &table);
  void* memory = nullptr;
  if (const int error = table.allocate(0, 64, &memory); error == 0) {
    EXPECT_EQ(table.free(0, memory), 0);
  } else {
    EXPECT_THROW(check(table, error, "allocating"), Error);
    EXPECT_STRNE(table.textOf(error), "");
  }
}

}  // namespace
}  // namespace smddp::cuda
