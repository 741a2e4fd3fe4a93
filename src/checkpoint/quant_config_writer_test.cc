#include "checkpoint/quant_config_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/linear_slots.h"

namespace nibble {
namespace {

using testing::HasSubstr;

SchemeUse use(std::string_view name, std::vector<std::string> modules = {}) {
  return {find_scheme(name).value(), std::move(modules)};
}

std::string written(const StoredQuantization& stored) {
  const auto json = stored_config_json(stored);
  EXPECT_TRUE(json.ok()) << json.status().message();
  return json.ok() ? json->dump() : "";
}

// The text that the format notes give as the smallest one that SGLang and vLLM load.
TEST(QuantConfigWriter, QuarkSaysWhatLoadersDereference) {
  EXPECT_EQ(
      written({.dialect = Dialect::kQuark, .uses = {use("w4a8")}, .ignore = {"lm_head"}}),
      R"({"quant_method":"quark","global_quant_config":{"input_tensors":{"dtype":"fp8_e4m3",)"
      R"("qscheme":"per_tensor","is_dynamic":true},"output_tensors":null,"bias":null,"weight":[)"
      R"({"dtype":"fp8_e4m3","qscheme":"per_tensor","is_dynamic":false},)"
      R"({"dtype":"int4","qscheme":"per_channel","ch_axis":0,"symmetric":true,)"
      R"("is_dynamic":false}]},"exclude":["lm_head"],"layer_quant_config":{},)"
      R"("layer_type_quant_config":{},"export":{"kv_cache_group":[],"min_kv_scale":0.0,)"
      R"("pack_method":"reorder","weight_format":"real_quantized","weight_merge_groups":null}})");
}

TEST(QuantConfigWriter, DeepSeekBlocks) {
  EXPECT_EQ(
      written({.dialect = Dialect::kFp8, .uses = {use("w8a8_fp8_block")}, .ignore = {"lm_head"}}),
      R"({"quant_method":"fp8","fmt":"e4m3","activation_scheme":"dynamic",)"
      R"("weight_block_size":[128,128],"modules_to_not_convert":["lm_head"]})");
}

TEST(QuantConfigWriter, SeveralSchemesHaveAGroupEach) {
  const Json json = stored_config_json({.uses = {use("w4a16_g32", {"re:.*experts.*"}),
                                                 use("w8a8_fp8", {"a.q_proj", "a.k_proj"}),
                                                 use("bf16", {"a.gate"})},
                                        .ignore = {"lm_head"}})
                        .value();
  EXPECT_EQ(json.find("format")->as_string(), "mixed-precision");
  EXPECT_EQ(json.find("ignore")->dump(), R"(["lm_head","a.gate"])");
  const Json& groups = *json.find("config_groups");
  EXPECT_EQ(groups.as_object().size(), 2U);
  EXPECT_EQ(groups.find("group_0")->find("targets")->dump(), R"(["re:.*experts.*"])");
  EXPECT_EQ(groups.find("group_0")->find("format")->as_string(), "pack-quantized");
  EXPECT_EQ(groups.find("group_1")->find("targets")->dump(), R"(["a.q_proj","a.k_proj"])");
  EXPECT_EQ(groups.find("group_1")->find("format")->as_string(), "float-quantized");
  const Json same =
      stored_config_json({.uses = {use("w4a16_g32", {"a"}), use("w4a16_g128", {"b"})}}).value();
  EXPECT_EQ(same.find("format")->as_string(), "pack-quantized");
  // INT8 weights alone: vLLM and SGLang know them packed only.
  const Json head =
      stored_config_json({.uses = {use("w4a16_g32", {"a"}), use("w8a16_channel", {"lm_head"})}})
          .value();
  EXPECT_EQ(head.find("format")->as_string(), "pack-quantized");
  EXPECT_EQ(stored_config_json({.uses = {use("w8a8_int8")}})->find("format")->as_string(),
            "int-quantized");
  EXPECT_EQ(stored_config_json({.uses = {use("w4a16_g32"), use("w8a8_fp8")}}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(QuantConfigWriter, NothingQuantizedHasNoConfig) {
  EXPECT_TRUE(stored_config_json({.uses = {use("bf16")}}).value().is_null());
}

TEST(QuantConfigWriter, ParametersOfTheNewerForms) {
  const std::string asym = written({.uses = {use("w4a16_g128_asym")}});
  EXPECT_THAT(asym, HasSubstr(R"("symmetric":false)"));
  EXPECT_THAT(asym, HasSubstr(R"("zp_dtype":"torch.int8")"));
  const std::string levels = written({.uses = {use("w4a8_g128")}});
  EXPECT_THAT(levels, HasSubstr(R"("symmetric":false,"strategy":"group","group_size":128)"));
  EXPECT_THAT(levels, HasSubstr(R"("input_activations":{"num_bits":8,"type":"int")"));
  const std::string mxfp4 = written({.uses = {use("mxfp4")}});
  EXPECT_THAT(mxfp4, HasSubstr(R"("num_bits":4,"type":"float")"));
  EXPECT_THAT(mxfp4, HasSubstr(R"("scale_dtype":"torch.uint8")"));
  EXPECT_THAT(mxfp4, HasSubstr(R"("format":"mxfp4-pack-quantized")"));
  EXPECT_THAT(mxfp4, HasSubstr(R"("input_activations":null)"));
  const std::string with_fp8 = written({.uses = {use("mxfp4_fp8")}});
  EXPECT_THAT(with_fp8, HasSubstr(R"("scale_dtype":"torch.uint8")"));
  EXPECT_THAT(with_fp8, HasSubstr(R"("input_activations":{"num_bits":8,"type":"float",)"
                                  R"("symmetric":true,"strategy":"token","group_size":null,)"
                                  R"("dynamic":true)"));
  EXPECT_THAT(with_fp8, HasSubstr(R"("format":"mxfp4-pack-quantized")"));
  EXPECT_THAT(written({.uses = {use("w8a8_fp8_block")}}),
              HasSubstr(R"("strategy":"block","group_size":null,"dynamic":false,"actorder":null,)"
                        R"("block_structure":[128,128])"));
  EXPECT_THAT(written({.uses = {use("w8a8_fp8_expert")}}), HasSubstr(R"("strategy":"tensor")"));
  EXPECT_THAT(written({.uses = {use("w4a16_g32")}, .kv_cache = KvCacheScheme::kFp8}),
              HasSubstr(R"("kv_cache_scheme":{"num_bits":8,"type":"float","symmetric":true,)"
                        R"("strategy":"tensor","dynamic":false})"));
}

TEST(QuantConfigWriter, RefusesWhatADialectCannotSay) {
  const auto refusal = [](const StoredQuantization& stored) {
    const auto json = stored_config_json(stored);
    EXPECT_EQ(json.status().code(), StatusCode::kUnsupported);
    return std::string(json.status().message());
  };
  EXPECT_THAT(refusal({.dialect = Dialect::kQuark, .uses = {use("w4a16_g32")}}),
              HasSubstr("--format: compressed-tensors"));
  EXPECT_THAT(
      refusal({.dialect = Dialect::kQuark, .uses = {use("w4a8", {"a"}), use("w4a8", {"b"})}}),
      HasSubstr("one scheme per model"));
  EXPECT_THAT(refusal({.dialect = Dialect::kFp8,
                       .uses = {use("w8a8_fp8_block")},
                       .kv_cache = KvCacheScheme::kFp8}),
              HasSubstr("--kv-cache-scheme"));
  EXPECT_THAT(refusal({.dialect = Dialect::kQuark, .uses = {use("w4a8")}, .ignore = {"re:.*gate"}}),
              HasSubstr("re:.*gate"));
  EXPECT_EQ(parse_kv_cache_scheme("int4").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(parse_dialect("gguf").status().code(), StatusCode::kInvalidArgument);
}

std::string shapes(std::string_view scheme, Dialect dialect) {
  std::string text;
  for (const TensorSlot& slot : linear_slots(find_scheme(scheme).value(), dialect, 200, 384)) {
    text += fmt::format("{} {} [", slot.suffix, dtype_name(slot.dtype));
    for (size_t i = 0; i < slot.shape.size(); ++i) {
      text += fmt::format("{}{}", i == 0 ? "" : ",", slot.shape[i]);
    }
    text += "] ";
  }
  return text;
}

TEST(LinearSlots, ShapesOfTheFormatNotes) {
  const Dialect standard = Dialect::kCompressedTensors;
  EXPECT_EQ(shapes("w4a16_g32_asym", standard),
            "weight_packed I32 [200,48] weight_scale BF16 [200,12] weight_zero_point I32 [25,12] "
            "weight_shape I64 [2] ");
  EXPECT_EQ(shapes("w4a8", Dialect::kQuark),
            "weight I32 [200,48] weight_scale F32 [1] weight_scale_2 F32 [200] ");
  EXPECT_EQ(shapes("w4a8", standard),
            "weight_packed I32 [200,48] weight_scale F32 [200,1] weight_shape I64 [2] ");
  EXPECT_EQ(shapes("w8a16_channel", standard),
            "weight_packed I32 [200,96] weight_scale BF16 [200,1] weight_shape I64 [2] ");
  EXPECT_EQ(shapes("w8a8_int8", standard), "weight I8 [200,384] weight_scale F32 [200,1] ");
  EXPECT_EQ(shapes("w8a8_fp8_block", Dialect::kFp8),
            "weight F8_E4M3 [200,384] weight_scale_inv F32 [2,3] ");
  EXPECT_EQ(shapes("w8a8_fp8_block", standard), "weight F8_E4M3 [200,384] weight_scale F32 [2,3] ");
  EXPECT_EQ(shapes("w8a8_fp8_expert", standard), "weight F8_E4M3 [200,384] weight_scale F32 [1] ");
  EXPECT_EQ(shapes("mxfp4", standard), "weight_packed U8 [200,192] weight_scale U8 [200,12] ");
  EXPECT_EQ(shapes("mxfp4_fp8", standard), shapes("mxfp4", standard));
}

}  // namespace
}  // namespace nibble
