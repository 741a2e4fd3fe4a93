#include <atomic>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "calibration/expert_sums.h"
#include "calibration/testing/calibration_test_base.h"

namespace nibble {
namespace {

/// Leaves a calibration no memory: experts are collected one by one.
class Starved final : public JobMaker {
 public:
  explicit Starved(JobMaker& maker) : maker_(maker) {}
  [[nodiscard]] Json recipe() const override { return maker_.recipe(); }
  Status make(const JobMakerContext& context) override {
    JobMakerContext without = context;
    without.memory = 0;
    return maker_.make(without);
  }

 private:
  JobMaker& maker_;
};

class ExpertCalibration : public Calibration {
 protected:
  /// Of a random model that few tokens say enough about.
  static CalibrationOptions of(const std::string& model, Rounding rounding) {
    CalibrationOptions how = calibration(model, rounding);
    how.text.length = 24;
    how.text.windows = 12;
    return how;
  }

  static std::map<std::string, CalibrationRecord> records(const QuantizeReport& report) {
    std::map<std::string, CalibrationRecord> found;
    for (const QuantizedTensor& tensor : report.tensors) {
      found[tensor.name] = tensor.calibration.value_or(CalibrationRecord{});
    }
    return found;
  }
};

TEST_F(ExpertCalibration, ToTheNearestIsWhatItIsWithoutIt) {
  for (const char* family : {"gpt_oss", "qwen2_moe", "mixtral"}) {
    const std::string model = dummy(family);
    QuantizeOptions plain = options(model, path("plain"), "w4a8");
    plain.plan.rules.head = find_scheme("w8a16_channel").value();
    plain.plan.dialect = Dialect::kCompressedTensors;
    plain.existing = ExistingOutput::kReplace;
    QuantizeOptions same = plain;
    same.destination = path("same");
    const auto expected = quantize_checkpoint(plain);
    ASSERT_TRUE(expected.ok()) << expected.status().message();
    const auto report = quantize(same, of(model, Rounding::kRtn));
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(weights("plain"), weights("same")) << family;
    for (const auto& [name, record] : records(*report)) {
      EXPECT_EQ(record.rounding, "rtn") << name;
      EXPECT_EQ(record.error, record.rtn_error) << name;
    }
  }
}

// Every row is seen by the experts that its router chooses; experts with few of them do with
// statistics that GPTQ would make too much of.
TEST_F(ExpertCalibration, SeesTheRowsThatAreRoutedToIt) {
  const std::string model = dummy("gpt_oss");
  CalibrationOptions how = of(model, Rounding::kGptq);
  how.text.windows = 1;  // 24 rows, 2 of 6 experts each: 8 for an expert on average
  const auto report = quantize(options(model, path("out"), "w4a16_g32"), how);
  ASSERT_TRUE(report.ok()) << report.status().message();
  std::map<std::string, int64_t> sums;
  int few = 0;
  int many = 0;
  for (const auto& [name, record] : records(*report)) {
    const size_t experts = name.find("experts.");
    if (experts == std::string::npos) {
      EXPECT_EQ(record.rows, 24) << name;
      continue;
    }
    sums[name.substr(0, experts) + name.substr(name.rfind('.'))] += record.rows;
    const int64_t k = name.ends_with("down_proj") ? 96 : 64;
    EXPECT_TRUE(record.rounding != "gptq" || record.rows >= k / 8) << name;
    EXPECT_TRUE(record.rounding != "imatrix" || record.rows < k / 8) << name;
    few += record.rounding == "imatrix" ? 1 : 0;
    many += record.rounding == "gptq" ? 1 : 0;
  }
  EXPECT_GT(few, 0);
  EXPECT_GT(many, 0);
  EXPECT_EQ(sums.size(), 6U);  // two layers of three
  for (const auto& [name, rows] : sums) {
    EXPECT_EQ(rows, 24 * 2) << name;
  }
}

TEST_F(ExpertCalibration, BytesDependOnNeitherMemoryNorThreadsNorInterruptions) {
  for (const char* family : {"gpt_oss", "qwen2_moe"}) {
    const std::string model = dummy(family);
    for (const Rounding rounding : {Rounding::kGptq, Rounding::kGptaq}) {
      const CalibrationOptions how = of(model, rounding);
      QuantizeOptions wanted = options(model, path("whole"), "w4a8");
      wanted.plan.rules.head = find_scheme("w8a16_channel").value();
      wanted.plan.dialect = Dialect::kCompressedTensors;
      wanted.existing = ExistingOutput::kReplace;
      const auto whole = quantize(wanted, how);
      ASSERT_TRUE(whole.ok()) << whole.status().message();
      wanted.destination = path("one_by_one");
      wanted.threads = 1;
      const auto maker = make_calibrator(how).value();
      Starved starved(*maker);
      wanted.maker = &starved;
      const auto little = quantize_checkpoint(wanted);
      ASSERT_TRUE(little.ok()) << little.status().message();
      EXPECT_EQ(weights("whole"), weights("one_by_one")) << family;
      fs::remove_all(path("stopped"));
      wanted.destination = path("stopped");
      int runs = 0;
      for (bool done = false; !done; ++runs) {
        ASSERT_LT(runs, 40);
        std::atomic<bool> stop = false;
        int left = 17;  // matrices until somebody stops it
        wanted.threads = 1 + runs % 2;
        wanted.stop = &stop;
        wanted.progress = [&](const QuantizeProgress&) { stop = --left <= 0; };
        done = quantize(wanted, how).ok();
      }
      EXPECT_GT(runs, 2);
      EXPECT_EQ(weights("whole"), weights("stopped")) << family;
    }
  }
}

// A layer's statistics are the same behind rounded experts as behind the same numbers in a model of
// its own.
TEST_F(ExpertCalibration, LaterLayersReadRoundedExperts) {
  const std::string model = dummy("gpt_oss");
  const CalibrationOptions how = of(model, Rounding::kRtn);
  const auto errors = [&](const std::string& source, const std::vector<std::string>& rules) {
    QuantizeOptions wanted = options(source, path("out"), "w4a16_g32");
    wanted.existing = ExistingOutput::kReplace;
    wanted.plan.rules.rules = rules;
    CalibrationOptions of_source = how;
    of_source.model = source;
    auto report = quantize(wanted, of_source);
    EXPECT_TRUE(report.ok()) << report.status().message();
    return records(*report);
  };
  QuantizeOptions first = options(model, path("first"), "w4a16_g32");
  first.plan.rules.rules = {"*.layers.1.*=keep"};
  ASSERT_TRUE(quantize_checkpoint(first).ok());
  ASSERT_TRUE(quantize_checkpoint(options(path("first"), path("decoded"), "bf16")).ok());
  const auto together = errors(model, {});
  const auto apart = errors(path("decoded"), {"*.layers.0.*=keep"});
  const auto unrounded = errors(model, {"*.layers.0.*=keep"});
  double near = 0;
  double far = 0;
  for (const auto& [name, record] : apart) {
    if (name.find("layers.1.mlp.experts") != std::string::npos) {
      near += std::fabs(together.at(name).rtn_error / record.rtn_error - 1);
      far += std::fabs(unrounded.at(name).rtn_error / record.rtn_error - 1);
    }
  }
  EXPECT_GT(far, 0);
  EXPECT_LT(near, far / 10);
}

// What is published in blocks of MXFP4 is read as any other source; to the same codes again nothing
// is lost.
TEST_F(ExpertCalibration, OfBlocksOfMxfp4) {
  const std::string model =
      dummy("gpt_oss", {{"quantization_config", Json::object({{"quant_method", "mxfp4"}})}});
  ASSERT_NE(weights("gpt_oss").find("gate_up_proj_blocks"), std::string::npos);
  for (const char* scheme : {"w4a16_g32", "w4a8", "mxfp4"}) {
    double before = 1;
    for (const Rounding rounding : {Rounding::kRtn, Rounding::kImatrix, Rounding::kGptq}) {
      QuantizeOptions wanted = options(model, path("out"), scheme);
      wanted.existing = ExistingOutput::kReplace;
      const auto report = quantize(wanted, of(model, rounding));
      ASSERT_TRUE(report.ok()) << report.status().message();
      double ratio = 0;
      const auto all = records(*report);
      for (const auto& [name, record] : all) {
        EXPECT_EQ(record.rtn_error == 0, std::string(scheme) == "mxfp4") << name;
        EXPECT_LE(record.error, record.rtn_error) << name;
        ratio += record.rtn_error > 0 ? record.error / record.rtn_error : 0.0;
      }
      ratio /= static_cast<double>(all.size());
      EXPECT_LE(ratio, before) << scheme;
      before = ratio;
    }
    EXPECT_LT(before, 0.95) << scheme;
  }
}

TEST_F(ExpertCalibration, OfTheHead) {
  double before = 1;
  for (const Rounding rounding : {Rounding::kImatrix, Rounding::kGptq}) {
    QuantizeOptions wanted = options(kModel, path("out"), "w4a16_g32");
    wanted.plan.rules.head = find_scheme("w4a16_g32").value();
    wanted.existing = ExistingOutput::kReplace;
    const auto report = quantize(wanted, calibration(kModel, rounding));
    ASSERT_TRUE(report.ok()) << report.status().message();
    const CalibrationRecord head = records(*report).at("lm_head");
    EXPECT_EQ(head.rounding, rounding_name(rounding));
    EXPECT_EQ(head.rows, 400);
    EXPECT_LT(head.error / head.rtn_error, before);
    before = head.error / head.rtn_error;
  }
}

TEST(ExpertSums, AreThoseOfEachExpertsRows) {
  constexpr int64_t kK = 20;
  ThreadPool pool(2);
  ExpertSums sums({2, 4}, {.k = kK, .with_float = FloatModel::kYes}, pool);
  EXPECT_TRUE(sums.wants(2));
  EXPECT_FALSE(sums.wants(1));
  std::vector<float> x(300 * kK);
  std::vector<float> wanted(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(static_cast<float>(i));
    wanted[i] = x[i] + 0.1F * std::cos(static_cast<float>(3 * i));
  }
  Gram gram(kK);
  Drift drift(kK);
  std::vector<float> taken;
  std::vector<float> taken_wanted;
  for (int64_t window = 0; window < 3;
       ++window) {  // of a hundred rows, of which an expert has some
    std::vector<int64_t> of;
    std::vector<float> rows;
    sums.set_wanted_by_row(wanted.data() + window * 100 * kK);
    for (int64_t row = window; row < 100; row += 2) {
      of.push_back(row);
      const auto at = (window * 100 + row) * kK;
      rows.insert(rows.end(), x.begin() + at, x.begin() + at + kK);
      taken_wanted.insert(taken_wanted.end(), wanted.begin() + at, wanted.begin() + at + kK);
    }
    taken.insert(taken.end(), rows.begin(), rows.end());
    sums.observe(3, of, rows.data());
    sums.observe(7, of, rows.data());  // somebody else's
  }
  sums.finish();
  const int64_t count = std::ssize(taken) / kK;
  gram.add(taken.data(), count, pool);
  drift.add({.x = taken.data(), .wanted = taken_wanted.data(), .count = count}, pool);
  EXPECT_EQ(sums.of(3).gram.rows(), count);
  EXPECT_EQ(sums.of(2).gram.rows(), 0);
  for (int64_t i = 0; i < kK; ++i) {
    for (int64_t j = i; j < kK; ++j) {
      const int64_t at = i * gram.stride() + j;
      EXPECT_EQ(sums.of(3).gram.data()[at], gram.data()[at]);
      EXPECT_EQ(sums.of(3).drift->data()[at], drift.data()[at]);
    }
  }
}

}  // namespace
}  // namespace nibble
