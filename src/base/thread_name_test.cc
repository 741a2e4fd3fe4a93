#include "base/thread_name.h"

#include <future>
#include <string>

#include <gtest/gtest.h>

#include "base/testing/thread_names.h"
#include "base/thread_pool.h"

namespace nibble {
namespace {

/// The names of all threads while one runs that was named so.
template <typename... Name>
std::multiset<std::string> names_with(const Name&... name) {
  return std::async(std::launch::async,
                    [&] {
                      name_thread(name...);
                      return thread_names();
                    })
      .get();
}

TEST(ThreadName, IsWhatTheSystemShows) {
  EXPECT_EQ(names_with("engine").count("engine"), 1U);
  EXPECT_EQ(names_with("http", 12).count("http-12"), 1U);
  EXPECT_EQ(thread_names().count("engine"), 0U);
}

TEST(ThreadName, IsCutToWhatTheSystemKeeps) {
  EXPECT_EQ(names_with("a name that is far too long").count("a name that is "), 1U);
  EXPECT_EQ(names_with("calibration-layer", 128).count("calibration-128"), 1U);
}

TEST(ThreadName, OfAPoolsThreadsHaveTheirNumbers) {
  const ThreadPool pool(3);
  for (const char* name : {"pool-1", "pool-2"}) {
    for (int tries = 0; thread_names().count(name) == 0; ++tries) {  // they may be about to begin
      ASSERT_LT(tries, 100000) << name;
    }
  }
}

}  // namespace
}  // namespace nibble
