#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "calibration/device_states.h"
#include "calibration/layer_jobs.h"
#include "calibration/layer_runner.h"
#include "calibration/part_times.h"
#include "calibration/state_file.h"
#include "quantizer/job_maker.h"

namespace nibble {

/// What is kept of every window between two passes over the text. Those from kFloatInput on are of
/// the model as it was before anything was rounded.
enum class Kept : uint8_t {
  kInput,     // hidden states that a layer gets
  kOutput,    // and those that it gives; within a layer those behind attention
  kAttended,  // what the output of attention multiplies
  kUp,        // gate and up of a dense MLP, or of the expert that every token takes
  kFloatInput,
  kFloatOutput,
  kFloatAttended,
  kFloatMiddle,  // hidden states behind attention
  kFloatUp,
  kFloatExperts,  // what down of the routed experts multiplies [rows * top_k, width]: f32, or of a
                  // device bf16
};
inline constexpr size_t kKept = 10;

/// Whether the model without rounding reads the text, too.
enum class FloatModel : bool { kNo, kYes };

/// The windows of a text on their way through a model: what is computed of them is in files of the
/// work folder, and passes run parts of a layer on one window after the other.
class Windows final {
 public:
  struct Parts {
    const JobMakerContext& context;
    const std::vector<std::vector<int32_t>>& tokens;
    LayerRunner& runner;
    PartTimes& times;
    FloatModel with_float = FloatModel::kNo;
    CalibrationMath* math = nullptr;  // of a device that the runner is on; null: the host
  };
  struct Pass {
    std::vector<Kept> reads;  // into the runner's memory; what is not kept is left out
    std::function<void(ForwardContext& context)> run;
    std::vector<Kept> writes = {};  // from there
    std::function<Status(int64_t window)> before = nullptr;
    std::function<Status(int64_t window)> after = nullptr;
  };

  explicit Windows(const Parts& parts) : parts_(parts) {}
  Status open_files();
  /// Whether this is kept between passes. On a device what hidden states are made into within a
  /// layer is not: to compute it again takes less time than to copy it. With the model without
  /// rounding all is, in files, and windows are copied and computed one after the other.
  [[nodiscard]] bool keeps(Kept what) const {
    return !beside_steps() || what == Kept::kInput || what == Kept::kOutput;
  }

  /// Where to go on: the first layer, with the embeddings as its inputs, unless an earlier run left
  /// the inputs of a later one. Layers are num_layers and the head.
  Result<int64_t> first_layer(const LayerJobs& jobs);
  /// Output becomes input; notes that a layer is done.
  Status finish_layer(int64_t layer);

  /// kCancelled when stopped.
  Status for_each(const Pass& pass);

  [[nodiscard]] int64_t rows() const { return std::ssize(parts_.tokens.front()); }
  [[nodiscard]] int64_t total_rows() const { return rows() * std::ssize(parts_.tokens); }
  /// Bytes that are kept of a window.
  [[nodiscard]] int64_t bytes(Kept what) const;
  Status read(Kept what, int64_t window, std::span<std::byte> out) const {
    return files_[file(what)].read(window, out);
  }
  Status write(Kept what, int64_t window, std::span<const std::byte> bytes) {
    return files_[file(what)].write(window, bytes);
  }

 private:
  [[nodiscard]] size_t file(Kept what) const;
  Status open_device();
  Status for_each_on_device(const Pass& pass);
  /// One window after the other through the device: `work` leaves what is kept, if anything is.
  using DeviceWork = std::function<void(std::span<const int32_t> tokens)>;
  enum class Fetched : bool { kNo, kYes };
  Status pass_through(Fetched reads, DeviceStates::Outcome outcome, const DeviceWork& work);
  /// Whether windows are on their way through a device while it computes others.
  [[nodiscard]] bool beside_steps() const {
    return parts_.math != nullptr && parts_.with_float == FloatModel::kNo;
  }
  Status run_window(const Pass& pass, int64_t window);
  /// Between a file and the runner's memory.
  Status load(Kept what, int64_t window);
  Status store(Kept what, int64_t window);
  /// The states in memory, to a file or from it.
  Status save_states();
  Status restore_states();
  /// Where the runner has it.
  [[nodiscard]] std::span<std::byte> place(Kept what) const;
  Status embed_all();
  [[nodiscard]] Result<std::string> input_digest() const;

  Parts parts_;
  std::vector<StateFile> files_;          // by Kept, as they are for the first layer
  int64_t turn_ = 0;                      // 1: inputs and outputs have changed places
  std::unique_ptr<DeviceStates> device_;  // null: not beside_steps()
  std::vector<std::byte> staged_;         // of a window, on its way to a device or from it
  PartTimes::Clock::time_point saved_ = PartTimes::Clock::now();  // states in memory
};

}  // namespace nibble
