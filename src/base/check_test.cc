#include "base/check.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

std::string message(const char* file) {
  try {
    throw_internal_error(file, 7, "x == y");
  } catch (const InternalError& error) {
    return error.what();
  }
}

TEST(Check, NamesTheFileFromTheRootOfTheRepositoryOn) {
  EXPECT_EQ(message("/some/src/folder/src/base/file.cc"),
            "internal error at src/base/file.cc:7: x == y");
  EXPECT_EQ(message("../../src/base/file.cc"), "internal error at src/base/file.cc:7: x == y");
  EXPECT_EQ(message("/some/folder/tools/main.cc"), "internal error at tools/main.cc:7: x == y");
  EXPECT_EQ(message("file.cc"), "internal error at file.cc:7: x == y");
  EXPECT_THROW(CHECK_EQ(1, 2), InternalError);
}

}  // namespace
}  // namespace nibble
