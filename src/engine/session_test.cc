#include "engine/session.h"

#include <filesystem>
#include <fstream>
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using ::testing::HasSubstr;

// A folder with the given files, gone at the end of the test.
class Folder final {
 public:
  Folder() {
    std::string pattern = testing::TempDir() + "/sessionXXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ + "/" + name) << text;
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string rendered(const Folder& folder) {
  auto chat_template = load_chat_template(folder.path());
  if (!chat_template.ok()) {
    return std::string(to_string(chat_template.status().code()));
  }
  return chat_template->render({.messages = JsonArray{}}).value();
}

TEST(Session, FindsTheChatTemplate) {
  const Folder folder;
  const std::string missing(to_string(StatusCode::kNotFound));
  EXPECT_EQ(rendered(folder), missing);
  folder.write("tokenizer_config.json", R"({"chat_template": null})");
  EXPECT_EQ(rendered(folder), missing);
  folder.write("tokenizer_config.json", R"({"chat_template": "plain"})");
  EXPECT_EQ(rendered(folder), "plain");
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": "tools", "template": "t"},
                                            {"name": "default", "template": "d"}]})");
  EXPECT_EQ(rendered(folder), "d");
  folder.write("tokenizer_config.json", R"({"chat_template": 5})");
  EXPECT_EQ(rendered(folder), to_string(StatusCode::kCorrupt));
  folder.write("chat_template.json", R"({"chat_template": "json"})");
  EXPECT_EQ(rendered(folder), "json");
  folder.write("chat_template.jinja", "jinja");
  EXPECT_EQ(rendered(folder), "jinja");
}

TEST(Session, KvCacheDtypeNames) {
  EXPECT_EQ(parse_kv_cache_dtype("auto").value(), std::nullopt);
  EXPECT_EQ(parse_kv_cache_dtype("f32").value(), KvCode::kF32);
  EXPECT_EQ(parse_kv_cache_dtype("int8").value(), KvCode::kInt8);
  EXPECT_EQ(parse_kv_cache_dtype("int4").value(), KvCode::kInt4);
  EXPECT_EQ(parse_kv_cache_dtype("int4_page").value(), KvCode::kInt4Page);
  EXPECT_EQ(parse_kv_cache_dtype("int4_static").value(), KvCode::kInt4Static);
  EXPECT_THAT(parse_kv_cache_dtype("fp4").status().message(), HasSubstr("'fp4'"));
}

TEST(Session, TheCacheHoldsWhatTheCheckpointsTypeHolds) {
  const auto backend = open_backend({}).value();
  ModelConfig config;
  config.num_layers = 1;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.dtype = DType::kBF16;
  EXPECT_EQ(kv_code_for(std::nullopt, config, *backend), KvCode::kBf16);
  EXPECT_EQ(kv_code_for(KvCode::kInt4, config, *backend), KvCode::kInt4);
  config.dtype = DType::kF16;
  EXPECT_EQ(kv_code_for(std::nullopt, config, *backend), KvCode::kF32);
  config.dtype = DType::kF32;
  EXPECT_EQ(kv_code_for(std::nullopt, config, *backend), KvCode::kF32);
  EXPECT_EQ(kv_code_for(KvCode::kBf16, config, *backend), KvCode::kBf16);
}

TEST(Session, ModelDefaultsComeBeforeTheFallback) {
  ModelConfig config;
  EXPECT_EQ(default_sampling(config, {.temperature = 0.25}).temperature, 0.25);
  config.default_temperature = 0.5;
  config.default_top_k = 7;
  const SamplingParams params = default_sampling(config, {.temperature = 0.25, .top_p = 0.9});
  EXPECT_EQ(params.temperature, 0.5);
  EXPECT_EQ(params.top_k, 7);
  EXPECT_EQ(params.top_p, 0.9);
}

TEST(Session, ErrorsNameTheFolder) {
  const Status status = open_session("no/such/model", {}).status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("no/such/model"));
  const Folder empty;
  EXPECT_FALSE(open_session(empty.path(), {}).ok());
}

// A real model on few pages: chunked prefill, batching, sharing and preemption do not change what
// a request says.
TEST(Session, StorytellerAnswersAloneAsInACrowd) {
  const auto answers = [](int64_t max_num_seqs, int64_t num_pages) {
    SessionOptions options;
    options.backend.cpu.threads = 2;
    options.engine = {.max_model_len = 128,
                      .max_num_seqs = max_num_seqs,
                      .max_num_batched_tokens = 16,
                      .num_pages = num_pages};
    auto session = open_session("models/storyteller", options);
    EXPECT_TRUE(session.ok()) << session.status().message();
    EXPECT_TRUE(session->chat_template.has_value());
    struct Collected {
      std::vector<int32_t> tokens;
      std::promise<void> done;
    };
    std::vector<std::shared_ptr<Collected>> all;
    for (const char* prompt : {"Once upon a time there was a king who",
                               "Once upon a time there was a king whose daughter was so very fair",
                               "The ship", "It was a dark and stormy night", "The sea"}) {
      auto collected = all.emplace_back(std::make_shared<Collected>());
      Request request;
      request.prompt = session->tokenizer->encode_prompt(prompt).value();
      request.max_tokens = 60;
      request.ignore_eos = true;
      request.sampling.temperature = 0;
      request.on_event = [collected](const TokenEvent& event) {
        collected->tokens.push_back(event.token);
        if (event.finish != FinishReason::kNone) {
          collected->done.set_value();
        }
      };
      EXPECT_TRUE(session->engine->submit(std::move(request)).ok());
    }
    std::vector<std::vector<int32_t>> out;
    for (const auto& collected : all) {
      collected->done.get_future().wait();
      out.push_back(collected->tokens);
      EXPECT_EQ(out.back().size(), 60U);
    }
    session->engine->drain(10);
    EXPECT_EQ(session->engine->stats().preemptions > 0, max_num_seqs > 1);
    return out;
  };
  EXPECT_EQ(answers(1, 64), answers(5, 10));
}

}  // namespace
}  // namespace nibble
