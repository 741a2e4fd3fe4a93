#include "checkpoint/turned_inputs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/quant_config.h"
#include "checkpoint/quant_config_writer.h"

namespace nibble {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// A transform_config with one group "u".
Json config_of(const std::string& group) {
  return Json::parse(R"({"config_groups":{"u":)" + group + "}}").value();
}

Result<std::vector<TurnedInputs>> read(const std::string& group) {
  return read_transform_config(config_of(group), "config.json: transform_config");
}

// What llm-compressor's SpinQuantModifier writes for R1 (in the weights) and R4, dumped by
// compressed-tensors 0.20.
TEST(TurnedInputs, AreReadAsLlmCompressorWritesThem) {
  const Json config = Json::parse(R"({"config_groups":{
      "R1":{"type":"random-hadamard","apply":[
        {"targets":["re:.*embed_tokens$"],"location":"weight_output","inverse":false,"ignore":[]},
        {"targets":["re:.*q_proj$"],"location":"weight_input","inverse":true,"ignore":[]}],
        "randomize":false,"requires_grad":false,"head_dim":null,"precision":"torch.float64"},
      "R4":{"type":"hadamard","apply":[
        {"targets":["re:.*down_proj$"],"location":"input","inverse":false,"ignore":["a.down_proj"]},
        {"targets":["re:.*down_proj$"],"location":"weight_input","inverse":true,"ignore":[]}],
        "randomize":false,"requires_grad":false,"head_dim":64,"precision":"torch.float32"}}})")
                          .value();
  const auto turned = read_transform_config(config, "here").value();
  ASSERT_EQ(turned.size(), 1U);
  EXPECT_EQ(turn_of(turned, "model.layers.3.mlp.down_proj", 192).value(), 64);
  EXPECT_EQ(turn_of(turned, "model.layers.3.mlp.up_proj", 192).value(), 0);
  EXPECT_EQ(turn_of(turned, "a.down_proj", 192).value(), 0);
  EXPECT_TRUE(read_transform_config(Json::parse("{}").value(), "here").value().empty());
  EXPECT_TRUE(read_transform_config(Json(), "here").value().empty());
}

TEST(TurnedInputs, WithoutASizeAreTurnedWhole) {
  const auto turned =
      read(R"({"type":"hadamard","apply":[{"targets":"Linear","location":"input"}]})").value();
  EXPECT_EQ(turn_of(turned, "x", 1024).value(), 1024);
  const Status status = turn_of(turned, "x", 1536).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("head_dim"), HasSubstr("1536")));
}

TEST(TurnedInputs, AreWrittenAsTheyAreRead) {
  const std::vector<TurnedInputs> wanted = {{.targets = {"re:.*down_proj$"}, .block = 256},
                                            {.targets = {"b"}, .ignore = {"c"}, .block = 2}};
  const Json json = transform_config_json(wanted);
  const auto turned = read_transform_config(json, "here").value();
  ASSERT_EQ(turned.size(), 2U);
  for (size_t i = 0; i < turned.size(); ++i) {
    EXPECT_EQ(turned[i].targets, wanted[i].targets);
    EXPECT_EQ(turned[i].ignore, wanted[i].ignore);
    EXPECT_EQ(turned[i].block, wanted[i].block);
  }
  EXPECT_EQ(json.find("config_groups")->find("R4")->dump(),
            R"({"type":"hadamard","apply":[)"
            R"({"targets":["re:.*down_proj$"],"location":"input","inverse":false,"ignore":[]},)"
            R"({"targets":["re:.*down_proj$"],"location":"weight_input","inverse":true,)"
            R"("ignore":[]}],"randomize":false,"requires_grad":false,"head_dim":256,)"
            R"("precision":"torch.float32"})");
}

// A folder whose weights are plain says it, too.
TEST(TurnedInputs, StandInAConfigWithoutSchemes) {
  const Json transforms = transform_config_json({{.targets = {"d"}, .block = 4}});
  const Json config = stored_config_json({.transforms = transforms}).value();
  const QuantConfig read = parse_quant_config(config, "config.json").value();
  EXPECT_TRUE(read.groups.empty());
  EXPECT_EQ(turn_of(read.turned, "d", 12).value(), 4);
  EXPECT_TRUE(stored_config_json({}).value().is_null());
  const Status status = stored_config_json({.dialect = Dialect::kQuark,
                                            .uses = {{find_scheme("w4a8").value(), {}}},
                                            .transforms = transforms})
                            .status();
  EXPECT_THAT(status.message(), AllOf(HasSubstr("quark"), HasSubstr("--format")));
}

TEST(TurnedInputs, ThatNothingComputesAreRefusedByField) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"(7)", "JSON object"},
      {R"({"apply":[]})", "type"},
      {R"({"type":"hadamard"})", "apply"},
      {R"({"type":"hadamard","apply":[],"surprise":1})", "surprise"},
      {R"({"type":"hadamard","apply":[{"location":"output"}]})", "location"},
      {R"({"type":"hadamard","apply":[{"location":"k_cache"}]})", "location"},
      {R"({"type":"hadamard","apply":[{"location":"q_attn"}]})", "location"},
      {R"({"type":"hadamard","apply":[{"targets":"x"}]})", "location"},
      {R"({"type":"random-hadamard","apply":[{"location":"input"}]})", "random-hadamard"},
      {R"({"type":"random-matrix","apply":[{"location":"input"}]})", "random-matrix"},
      {R"({"type":"hadamard","randomize":true,"apply":[{"location":"input"}]})", "randomize"},
      {R"({"type":"hadamard","apply":[{"location":"input","targets":["re:("]}]})", "pattern"},
      {R"({"type":"hadamard","apply":[{"location":"input","targets":[1]}]})", "targets"},
      {R"({"type":"hadamard","apply":[{"location":"input","inverse":1}]})", "inverse"},
      {R"({"type":"hadamard","head_dim":"x","apply":[{"location":"input"}]})", "head_dim"},
  };
  for (const auto& [group, complaint] : cases) {
    const Status status = read(group).status();
    ASSERT_FALSE(status.ok()) << group;
    EXPECT_THAT(status.message(), AllOf(HasSubstr("transform_config"), HasSubstr(complaint)))
        << group;
  }
  for (const int64_t block : {-2, 1, 3, 12, 64}) {
    EXPECT_EQ(turn_of({{.targets = {"x"}, .block = block}}, "x", 96).status().code(),
              StatusCode::kUnsupported)
        << block;
  }
  const Status twice =
      turn_of({{.targets = {"x"}, .block = 4}, {.targets = {"x"}, .block = 4}}, "x", 96).status();
  EXPECT_THAT(twice.message(), HasSubstr("once more"));
}

}  // namespace
}  // namespace nibble
