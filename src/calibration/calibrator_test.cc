#include "calibration/calibrator.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calibration/testing/calibration_test_base.h"
#include "quantizer/recipe.h"

namespace nibble {
namespace {

using testing::HasSubstr;

TEST_F(Calibration, ToTheNearestIsWhatItIsWithoutIt) {
  for (const char* scheme :
       {"w4a16_g32", "w4a8", "w8a8_int8", "w4a16_g128_asym", "w4a8_g128", "mxfp4"}) {
    QuantizeOptions plain = options(kModel, path("plain"), scheme);
    QuantizeOptions same = options(kModel, path("same"), scheme);
    plain.existing = same.existing = ExistingOutput::kReplace;
    ASSERT_TRUE(quantize_checkpoint(plain).ok());
    const auto report = quantize(same, calibration(kModel, Rounding::kRtn));
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(weights("plain"), weights("same")) << scheme;
    for (const QuantizedTensor& tensor : report->tensors) {
      ASSERT_TRUE(tensor.calibration.has_value()) << tensor.name;
      EXPECT_EQ(tensor.calibration->error, tensor.calibration->rtn_error);
    }
  }
}

TEST_F(Calibration, LosesLessOfTheOutputs) {
  for (const char* scheme :
       {"w4a16_g32", "w4a8", "w8a8_int8", "w4a16_g128_asym", "w4a8_g128", "mxfp4"}) {
    double before = 2;
    for (const Rounding rounding : {Rounding::kImatrix, Rounding::kGptq}) {
      QuantizeOptions wanted = options(kModel, path("out"), scheme);
      wanted.existing = ExistingOutput::kReplace;
      const auto report = quantize(wanted, calibration(kModel, rounding));
      ASSERT_TRUE(report.ok()) << report.status().message();
      double sum = 0;
      for (const QuantizedTensor& tensor : report->tensors) {
        ASSERT_TRUE(tensor.calibration.has_value()) << tensor.name;
        EXPECT_LE(tensor.calibration->error, tensor.calibration->rtn_error) << tensor.name;
        sum += tensor.calibration->error / tensor.calibration->rtn_error;
      }
      sum /= static_cast<double>(report->tensors.size());
      EXPECT_LT(sum, before) << scheme;
      before = rounding == Rounding::kImatrix ? sum : before;
      if (rounding == Rounding::kGptq) {
        EXPECT_LT(sum, 0.75) << scheme;
      }
    }
  }
}

class Interrupted : public Calibration, public testing::WithParamInterface<Rounding> {};
INSTANTIATE_TEST_SUITE_P(Calibration,
                         Interrupted,
                         testing::Values(Rounding::kGptq, Rounding::kGptaq, Rounding::kLwc));

TEST_P(Interrupted, BytesDependNeitherOnThreadsNorOnInterruptions) {
  const CalibrationOptions how = calibration(kModel, GetParam());
  QuantizeOptions wanted = options(kModel, path("whole"), "w4a8");
  ASSERT_TRUE(quantize(wanted, how).ok());
  wanted.destination = path("one_thread");
  wanted.threads = 1;
  ASSERT_TRUE(quantize(wanted, how).ok());
  EXPECT_EQ(weights("whole"), weights("one_thread"));
  wanted.destination = path("stopped");
  int runs = 0;
  for (bool done = false; !done; ++runs) {
    ASSERT_LT(runs, 40);
    std::atomic<bool> stop = false;
    int left = 5;  // matrices until somebody stops it
    wanted.threads = 1 + runs % 2;
    wanted.stop = &stop;
    wanted.progress = [&](const QuantizeProgress&) { stop = --left <= 0; };
    const auto report = quantize(wanted, how);
    done = report.ok();
    if (!done) {
      ASSERT_EQ(report.status().code(), StatusCode::kCancelled) << report.status().message();
    }
  }
  EXPECT_GT(runs, 3);
  EXPECT_EQ(weights("whole"), weights("stopped"));
  for (const auto& entry : fs::directory_iterator(path("stopped"))) {
    EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("calibration-")));
  }
}

// Where every piece is kept, a matrix is as if it were rounded whole.
TEST_F(Calibration, InPiecesIsAsAWhole) {
  const std::string model = dummy("llama3", {{"vocab_size", 40000}});
  CalibrationOptions how = calibration(model, Rounding::kGptq);
  how.text.length = 100;
  for (const char* scheme : {"w4a16_channel", "w4a16_g32_asym", "mxfp4"}) {
    QuantizeOptions wanted = options(model, path("whole"), scheme);
    wanted.plan.rules.head = find_scheme(scheme).value();  // of three chunks
    wanted.existing = ExistingOutput::kReplace;
    how.piece_weights = int64_t{1} << 25;
    const auto whole = quantize(wanted, how);
    ASSERT_TRUE(whole.ok()) << whole.status().message();
    wanted.destination = path("pieces");
    how.piece_weights = 1;  // a chunk at a time
    const auto pieces = quantize(wanted, how);
    ASSERT_TRUE(pieces.ok()) << pieces.status().message();
    EXPECT_EQ(weights("whole"), weights("pieces")) << scheme;
    for (size_t i = 0; i < whole->tensors.size(); ++i) {
      EXPECT_NEAR(whole->tensors[i].calibration->error / pieces->tensors[i].calibration->error, 1,
                  1e-6);
      EXPECT_EQ(whole->tensors[i].snr_db, pieces->tensors[i].snr_db);
    }
  }
}

// A kill loses the layer that it meets, no more.
TEST_P(Interrupted, GoesOnAfterAKill) {
  const CalibrationOptions how = calibration(kModel, GetParam());
  QuantizeOptions wanted = options(kModel, path("whole"), "w4a16_g32");
  ASSERT_TRUE(quantize(wanted, how).ok());
  wanted.destination = path("killed");
  int most = 0;
  for (const int kill_at : {10, 17, 25, 33, 41}) {  // matrices; a layer has seven
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int made = 0;
      wanted.threads = 1;  // threads do not outlive a fork
      wanted.progress = [&](const QuantizeProgress& progress) {
        ++made;
        if (progress.tensors_done >= kill_at) {
          std::ofstream(path("made")) << made;
          ::kill(::getpid(), SIGKILL);
        }
      };
      static_cast<void>(quantize(wanted, how));
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    most = std::max(most, std::stoi(read_file(path("made")).value()));
  }
  EXPECT_LE(most, 16);  // the layer before was not made again
  wanted.threads = 2;
  ASSERT_TRUE(quantize(wanted, how).ok());
  EXPECT_EQ(weights("whole"), weights("killed"));
}

TEST_F(Calibration, AnotherTextIsAnotherPlan) {
  QuantizeOptions wanted = options(kModel, path("out"), "w4a16_g32");
  CalibrationOptions how = calibration(kModel, Rounding::kGptq);
  std::atomic<bool> stop = false;
  wanted.stop = &stop;
  wanted.progress = [&](const QuantizeProgress&) { stop = true; };
  ASSERT_EQ(quantize(wanted, how).status().code(), StatusCode::kCancelled);
  wanted.stop = nullptr;
  how.text.seed = 1;
  const Status other = quantize(wanted, how).status();
  EXPECT_EQ(other.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(other.message(), HasSubstr("other options"));
}

// Every family that runs, with its norms, biases, activations, windows and experts.
TEST_F(Calibration, OfEveryFamily) {
  for (const char* family : {"llama3", "llama_bias", "mistral", "qwen2", "qwen2_window", "qwen3",
                             "opt", "starcoder2", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss"}) {
    for (const Rounding rounding : {Rounding::kGptq, Rounding::kGptaq}) {
      CalibrationOptions how = calibration(dummy(family), rounding);
      how.text.length = 24;
      how.text.windows = 12;
      QuantizeOptions wanted = options(how.model, path("out"), "w8a16_channel");
      wanted.existing = ExistingOutput::kReplace;
      const auto report = quantize(wanted, how);
      ASSERT_TRUE(report.ok()) << family << ": " << report.status().message();
      for (const QuantizedTensor& tensor : report->tensors) {
        ASSERT_TRUE(tensor.calibration.has_value()) << family << " " << tensor.name;
        EXPECT_GT(tensor.calibration->rtn_error, 0) << family << " " << tensor.name;
        EXPECT_LE(tensor.calibration->error, tensor.calibration->rtn_error)
            << family << " " << tensor.name;
        const bool routed = tensor.name.find("experts.") != std::string::npos;
        EXPECT_TRUE(routed || tensor.calibration->rows == 12 * 24) << family << " " << tensor.name;
      }
      fs::remove_all(how.model);
    }
  }
}

TEST_F(Calibration, RefusesTextsThatSayNothing) {
  const auto attempt = [&](const std::string& name, std::string_view content) {
    std::ofstream(path(name), std::ios::binary) << content;
    CalibrationOptions how = calibration(kModel, Rounding::kGptq);
    how.text.path = path(name);
    return quantize(options(kModel, path("out"), "w4a16_g32"), how).status();
  };
  EXPECT_THAT(attempt("empty.txt", "").message(), HasSubstr("is empty"));
  EXPECT_THAT(attempt("short.txt", "Once upon a time.").message(), HasSubstr("columns"));
  EXPECT_THAT(attempt("zeros.txt", std::string_view("a\0b", 3)).message(), HasSubstr("zero bytes"));
  const Status line = attempt("lines.jsonl", "{\"text\": \"a\"}\n\n{\"words\": \"b\"}\n");
  EXPECT_EQ(line.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(line.message(), HasSubstr("line 3"));
  EXPECT_THAT(attempt("broken.jsonl", "{\"text\"").message(), HasSubstr("line 1"));
  EXPECT_EQ(attempt("empty.jsonl", "\n").code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(Calibration, RefusesWhatItCannotDo) {
  const CalibrationOptions how = calibration(kModel, Rounding::kGptq);
  const Status fp8 = quantize(options(kModel, path("out"), "w8a8_fp8"), how).status();
  EXPECT_EQ(fp8.code(), StatusCode::kUnsupported);
  EXPECT_THAT(fp8.message(), HasSubstr("integer"));
  QuantizeOptions part = options(kModel, path("out"), "w4a16_g32");
  part.share = {.kind = QuantizeShare::Kind::kPart, .part = 1, .parts = 2};
  EXPECT_THAT(quantize(part, how).status().message(), HasSubstr("--part"));
  QuantizeOptions quark = options(kModel, path("out"), "w4a8");
  quark.plan.scale_rule = ScaleRule::kQuark;
  EXPECT_THAT(quantize(quark, how).status().message(), HasSubstr("--scale-rule"));
  CalibrationOptions longer = how;
  longer.text.length = 1 << 20;
  EXPECT_THAT(make_calibrator(longer).status().message(), HasSubstr("--calibration-length"));
}

TEST_F(Calibration, WritesARecipeThatIsReadBack) {
  QuantizeOptions wanted = options(kModel, path("out"), "w4a16_g32");
  wanted.plan.scale_rule = ScaleRule::kMse;
  wanted.plan.rules.rules = {"*.0.self_attn.*=keep"};
  wanted.plan.rules.ignore = {"*.down_proj"};
  ASSERT_TRUE(quantize(wanted, calibration(kModel, Rounding::kImatrix)).ok());
  const auto read = read_recipe(path("out") + "/" + std::string(kRecipeName));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->rules.scheme, wanted.plan.rules.scheme);
  EXPECT_EQ(read->scale_rule, ScaleRule::kMse);
  EXPECT_EQ(read->rules.rules, wanted.plan.rules.rules);
  EXPECT_EQ(read->rules.ignore, wanted.plan.rules.ignore);
  EXPECT_EQ(read->calibration.find("method")->as_string(), "imatrix");
  EXPECT_EQ(read->calibration.find("tokens")->as_int(), 400);
  std::ofstream(path("bad.json")) << R"({"nibble_recipe": 1, "scheme": 3})";
  EXPECT_THAT(read_recipe(path("bad.json")).status().message(), HasSubstr("scheme"));
}

TEST_F(Calibration, TakesWindowsWithoutOverlap) {
  const auto tokenizer = Tokenizer::load(kModel).value();
  const CalibrationTextOptions all{.path = kText, .windows = 1000, .length = 50};
  const auto whole = read_calibration_text(all, *tokenizer).value();
  CalibrationTextOptions few = all;
  few.windows = 10;
  const auto some = read_calibration_text(few, *tokenizer).value();
  ASSERT_EQ(some.windows.size(), 10U);
  auto at = whole.windows.begin();
  for (const std::vector<int32_t>& window : some.windows) {  // in the text's order
    at = std::find(at, whole.windows.end(), window);
    ASSERT_NE(at, whole.windows.end());
    ++at;
  }
  few.seed = 1;
  EXPECT_NE(read_calibration_text(few, *tokenizer)->windows, some.windows);
  std::ofstream(path("two.jsonl")) << "{\"text\": \"One day\"}\n{\"text\": \"she left\"}\n";
  std::ofstream(path("two.txt")) << "One day\n\nshe left";
  const auto lines =
      read_calibration_text({.path = path("two.jsonl"), .length = 9}, *tokenizer).value();
  EXPECT_EQ(lines.windows,
            read_calibration_text({.path = path("two.txt"), .length = 9}, *tokenizer)->windows);
}

}  // namespace
}  // namespace nibble
