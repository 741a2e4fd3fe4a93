#include "calibration/windows.h"

#include <array>
#include <string_view>

#include "base/check.h"
#include "calibration/progress_file.h"

namespace nibble {
namespace {

constexpr std::array<std::string_view, kKept> kFileNames = {
    "states-0.bin", "states-1.bin",       "attended.bin",     "up.bin",       "float-0.bin",
    "float-1.bin",  "float-attended.bin", "float-middle.bin", "float-up.bin", "float-experts.bin"};

/// States in memory are saved at the end of a layer where as much time has gone by: they are
/// gigabytes, and layers take seconds. What is lost of a run that is killed is a minute's work.
constexpr std::chrono::seconds kSaveEvery{60};

}  // namespace

int64_t Windows::bytes(Kept what) const {
  const LayerRunner& runner = parts_.runner;
  switch (what) {
    case Kept::kInput:
    case Kept::kOutput:
    case Kept::kFloatInput:
    case Kept::kFloatOutput:
    case Kept::kFloatMiddle:
      return rows() * runner.hidden_row_bytes();
    case Kept::kAttended:
    case Kept::kFloatAttended:
      return rows() * runner.row_bytes(ScratchName::kAttended);
    case Kept::kUp:
    case Kept::kFloatUp:
      return rows() * runner.row_bytes(ScratchName::kUp);
    case Kept::kFloatExperts: {
      const MoeConfig& moe = runner.config().moe;
      const int64_t element = parts_.math == nullptr ? 4 : 2;
      return rows() * moe.experts_per_token * moe.width * element;
    }
  }
  return 0;
}

std::span<std::byte> Windows::place(Kept what) const {
  LayerRunner& runner = parts_.runner;
  CHECK(what != Kept::kFloatExperts);
  switch (what) {
    case Kept::kAttended:
    case Kept::kFloatAttended:
      return runner.scratch_rows(ScratchName::kAttended, rows());
    case Kept::kUp:
    case Kept::kFloatUp:
      return runner.scratch_rows(ScratchName::kUp, rows());
    default:
      return runner.hidden_rows(rows());
  }
}

size_t Windows::file(Kept what) const {
  const auto index = static_cast<size_t>(what);
  const bool turns = what == Kept::kInput || what == Kept::kOutput || what == Kept::kFloatInput ||
                     what == Kept::kFloatOutput;
  return turns && turn_ == 1 ? index ^ 1U : index;
}

Status Windows::open_files() {
  size_t count =
      parts_.with_float == FloatModel::kYes ? kKept : static_cast<size_t>(Kept::kFloatInput);
  if (beside_steps()) {
    count = static_cast<size_t>(Kept::kAttended);
    NIBBLE_RETURN_IF_ERROR(
        parts_.times.time(CalibrationPart::kStates, [&] { return open_device(); }));
  }
  for (size_t i = 0; i < count; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(StateFile file,
                            StateFile::open(calibration_file(parts_.context.folder, kFileNames[i]),
                                            bytes(Kept{static_cast<uint8_t>(i)})));
    files_.push_back(std::move(file));
  }
  return {};
}

Result<std::string> Windows::input_digest() const {
  const int64_t count = std::ssize(parts_.tokens);
  std::vector<Digest> digests;
  NIBBLE_ASSIGN_OR_RETURN(digests.emplace_back(), files_[file(Kept::kInput)].digest(count));
  if (parts_.with_float == FloatModel::kYes) {
    NIBBLE_ASSIGN_OR_RETURN(digests.emplace_back(), files_[file(Kept::kFloatInput)].digest(count));
  }
  return digest_text(combine_digests(digests));
}

Result<int64_t> Windows::first_layer(const LayerJobs& jobs) {
  const auto progress = read_calibration_progress(parts_.context.folder);
  if (progress && progress->layer <= parts_.runner.config().num_layers) {
    bool usable = true;
    for (int64_t layer = 0; layer < progress->layer; ++layer) {
      usable = usable && jobs.layer_done(layer, parts_.context.store);
    }
    turn_ = progress->file;
    const auto digest = input_digest();
    if (usable && digest.ok() && *digest == progress->digest) {
      parts_.runner.release_embeddings();
      NIBBLE_RETURN_IF_ERROR(restore_states());
      return progress->layer;
    }
  }
  NIBBLE_RETURN_IF_ERROR(embed_all());
  parts_.runner.release_embeddings();
  return 0;
}

Status Windows::embed_all() {
  turn_ = 0;
  if (device_ != nullptr) {
    device_->begin(nullptr, &files_[file(Kept::kInput)]);
    return pass_through(Fetched::kNo, DeviceStates::Outcome::kKept,
                        [&](std::span<const int32_t> tokens) { parts_.runner.embed(tokens); });
  }
  for (int64_t window = 0; window < std::ssize(parts_.tokens); ++window) {
    parts_.runner.embed(parts_.tokens[static_cast<size_t>(window)]);
    NIBBLE_RETURN_IF_ERROR(store(Kept::kInput, window));
    if (parts_.with_float == FloatModel::kYes) {
      NIBBLE_RETURN_IF_ERROR(store(Kept::kFloatInput, window));
    }
  }
  return {};
}

Status Windows::finish_layer(int64_t layer) {
  if (device_ != nullptr && device_->in_memory()) {
    if (PartTimes::Clock::now() - saved_ < kSaveEvery) {
      return parts_.context.store.flush();
    }
    NIBBLE_RETURN_IF_ERROR(save_states());
  }
  turn_ = 1 - turn_;
  NIBBLE_RETURN_IF_ERROR(parts_.context.store.flush());
  NIBBLE_RETURN_IF_ERROR(files_[file(Kept::kInput)].sync());
  if (parts_.with_float == FloatModel::kYes) {
    NIBBLE_RETURN_IF_ERROR(files_[file(Kept::kFloatInput)].sync());
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string digest, input_digest());
  NIBBLE_RETURN_IF_ERROR(
      write_calibration_progress(parts_.context.folder, {layer + 1, turn_, digest}));
  saved_ = PartTimes::Clock::now();
  return {};
}

Status Windows::for_each(const Pass& pass) {
  if (device_ != nullptr) {
    return for_each_on_device(pass);
  }
  for (int64_t window = 0; window < std::ssize(parts_.tokens); ++window) {
    NIBBLE_RETURN_IF_ERROR(run_window(pass, window));
  }
  return {};
}

Status Windows::load(Kept what, int64_t window) {
  if (parts_.math == nullptr) {
    return read(what, window, place(what));
  }
  staged_.resize(place(what).size());
  NIBBLE_RETURN_IF_ERROR(read(what, window, staged_));
  parts_.math->upload(place(what).data(), staged_);
  return {};
}

Status Windows::store(Kept what, int64_t window) {
  if (parts_.math == nullptr) {
    return write(what, window, place(what));
  }
  staged_.resize(place(what).size());
  parts_.math->download(staged_, place(what).data());
  return write(what, window, staged_);
}

Status Windows::run_window(const Pass& pass, int64_t window) {
  if (parts_.context.stop != nullptr && *parts_.context.stop) {
    return make_error(StatusCode::kCancelled, "stopped");
  }
  PartTimes& times = parts_.times;
  NIBBLE_RETURN_IF_ERROR(times.time(CalibrationPart::kStates, [&]() -> Status {
    for (const Kept what : pass.reads) {
      NIBBLE_RETURN_IF_ERROR(load(what, window));
    }
    return pass.before ? pass.before(window) : Status();
  }));
  const double sums = times.seconds(CalibrationPart::kSums);
  times.time(CalibrationPart::kForward,
             [&] { parts_.runner.run(parts_.tokens[static_cast<size_t>(window)], pass.run); });
  times.add(CalibrationPart::kForward, sums - times.seconds(CalibrationPart::kSums));
  return times.time(CalibrationPart::kStates, [&]() -> Status {
    for (const Kept what : pass.writes) {
      NIBBLE_RETURN_IF_ERROR(store(what, window));
    }
    return pass.after ? pass.after(window) : Status();
  });
}

}  // namespace nibble
