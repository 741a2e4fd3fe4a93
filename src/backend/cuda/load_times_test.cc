// Which clock counts what while weights get to a GPU. Needs no GPU.

#include "backend/cuda/load_times.h"

#include <thread>

#include <gtest/gtest.h>

namespace nibble::cuda {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

// An upload that claims what it took, as Uploader does.
void pretend_to_upload(Uploader::Spent& spent, milliseconds filling, milliseconds waiting) {
  std::this_thread::sleep_for(filling + waiting);
  spent.filling += filling;
  spent.waiting += waiting;
  spent.bytes += 1'000'000'000;
}

TEST(LoadTimes, TimeOfUploadsIsCountedOnce) {
  Uploader::Spent spent;
  LoadTimes times;
  spent.filling = milliseconds(300);  // of nobody who prepares
  const auto prepare = [&] {
    pretend_to_upload(spent, milliseconds(40), milliseconds(20));
    std::this_thread::sleep_for(milliseconds(30));
    return 7;
  };
  EXPECT_EQ(times.prepare(spent, prepare), 7);
  EXPECT_EQ(times.prepare(spent, [] { return 8; }), 8);
  EXPECT_EQ(times.wait([] {
    std::this_thread::sleep_for(milliseconds(10));
    return 9;
  }),
            9);
  // Sleeping may take longer, but never less.
  EXPECT_GE(times.preparing(), duration<double>(0.03));
  EXPECT_GE(times.waiting(), duration<double>(0.01));
}

TEST(LoadTimes, NoUploadLeavesNothingNegative) {
  const Uploader::Spent spent{.bytes = 2'000'000'000, .filling = duration<double>(9.9)};
  LoadTimes times;
  EXPECT_EQ(times.text(spent),
            "2.00 GB sent to the GPU: 9.90 s copying to page-locked memory, 0.00 s waiting until "
            "that was sent, 0.00 s for GPU memory and starting kernels, 0.00 s until the last of "
            "each matrix or layer was packed");
}

}  // namespace
}  // namespace nibble::cuda
