#include "server/schema.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

ApiError chat_error(std::string_view body, Strictness strictness = Strictness::kLenient) {
  const ParsedRequest parsed = parse_chat_request(body, {.strictness = strictness});
  const auto* error = std::get_if<ApiError>(&parsed);
  EXPECT_NE(error, nullptr) << body;
  return error != nullptr ? *error : ApiError{};
}

GenerationRequest chat(std::string_view members) {
  const std::string body =
      R"({"messages":[{"role":"user","content":"hi"}])" + std::string(members) + "}";
  const ParsedRequest parsed = parse_chat_request(body, {});
  const auto* error = std::get_if<ApiError>(&parsed);
  EXPECT_EQ(error, nullptr) << (error != nullptr ? error->message : "");
  return error == nullptr ? std::get<GenerationRequest>(parsed) : GenerationRequest{};
}

std::string param_of(std::string_view members) {
  return chat_error(R"({"messages":[{"role":"user","content":"hi"}],)" + std::string(members) + "}")
      .param;
}

TEST(Schema, TextsOfClientsAreCut) {
  const std::string many(5000, 'x');
  const std::string user = R"({"messages":[{"role":"user","content":"hi"}],)";
  for (const std::string& body :
       {R"({"messages":[{"role":")" + many + R"(","content":"hi"}]})",
        user + R"("response_format":{"type":")" + many + R"("}})",
        user + R"("logit_bias":{")" + many + R"(":1}})",
        user + R"("logit_bias":{")" + std::string(5000, '0') + R"(":1000}})",
        user + R"("stop_token_ids":[")" + many + R"("]})"}) {
    EXPECT_LT(chat_error(body).message.size(), 250U);
  }
  EXPECT_LT(chat_error(user + "\"" + many + R"(":1})", Strictness::kStrict).message.size(), 250U);
}

TEST(Schema, ReadsEveryFieldOfAChat) {
  const GenerationRequest request = chat(
      R"(,"model":"m","max_tokens":5,"max_completion_tokens":7,"temperature":0,"top_p":0.5,"top_k":3,
      "min_p":0.1,"repetition_penalty":1.1,"presence_penalty":-1,"frequency_penalty":2,"seed":-1,
      "stop":["a","b"],"n":2,"stream":true,"stream_options":{"include_usage":true},"logprobs":true,
      "top_logprobs":4,"min_tokens":2,"ignore_eos":true,"stop_token_ids":[9],"logit_bias":{"3":-100},
      "chat_template_kwargs":{"enable_thinking":false},"tools":[{"type":"function","function":{"name":"add"}}],
      "reasoning_effort":"none","parallel_tool_calls":false,
      "response_format":{"type":"text"},"user":"x","best_of":null)");
  EXPECT_EQ(request.model, "m");
  EXPECT_EQ(request.max_tokens, 7);
  EXPECT_EQ(request.sampling.temperature, 0);
  EXPECT_EQ(request.sampling.top_p, 0.5);
  EXPECT_EQ(request.sampling.top_k, 3);
  EXPECT_EQ(request.sampling.min_p, 0.1);
  EXPECT_EQ(request.sampling.repetition_penalty, 1.1);
  EXPECT_EQ(request.sampling.presence_penalty, -1);
  EXPECT_EQ(request.sampling.frequency_penalty, 2);
  EXPECT_EQ(request.sampling.seed, ~uint64_t{0});
  EXPECT_EQ(request.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(request.n, 2);
  EXPECT_TRUE(request.stream && request.include_usage && request.ignore_eos);
  EXPECT_EQ(request.logprobs, 4);
  EXPECT_EQ(request.min_tokens, 2);
  EXPECT_EQ(request.stop_token_ids, std::vector<int32_t>{9});
  ASSERT_EQ(request.sampling.logit_bias.size(), 1U);
  EXPECT_EQ(request.sampling.logit_bias[0], (std::pair<int32_t, float>(3, -100.0F)));
  EXPECT_TRUE(request.template_arguments.is_object());
  EXPECT_TRUE(request.tools.is_array());
  EXPECT_EQ(request.functions, std::vector<std::string>{"add"});
  EXPECT_FALSE(request.parallel_tool_calls);
  EXPECT_EQ(request.template_arguments.dump(),
            R"({"enable_thinking":false,"reasoning_effort":"none","thinking":false})");
}

TEST(Schema, NamesTheFieldThatIsWrong) {
  EXPECT_EQ(param_of(R"("temperature":"hot")"), "temperature");
  EXPECT_EQ(param_of(R"("temperature":-0.1)"), "temperature");
  EXPECT_EQ(param_of(R"("top_p":0)"), "top_p");
  EXPECT_EQ(param_of(R"("max_tokens":0)"), "max_tokens");
  EXPECT_EQ(param_of(R"("max_tokens":1.5)"), "max_tokens");
  EXPECT_EQ(param_of(R"("n":0)"), "n");
  EXPECT_EQ(param_of(R"("stream":1)"), "stream");
  EXPECT_EQ(param_of(R"("stream_options":{"include_usage":true})"), "stream_options");
  EXPECT_EQ(param_of(R"("stream":true,"stream_options":{"include_usage":1})"),
            "stream_options.include_usage");
  EXPECT_EQ(param_of(R"("stop":[1])"), "stop");
  EXPECT_EQ(param_of(R"("stop":"")"), "stop");
  EXPECT_EQ(param_of(R"("stop":["a",""])"), "stop");
  EXPECT_EQ(param_of(R"("max_tokens":-1)"), "max_tokens");
  EXPECT_EQ(param_of(R"("max_tokens":99999999999)"), "max_tokens");
  EXPECT_EQ(param_of(R"("max_tokens":99999999999999999999)"), "max_tokens");
  EXPECT_EQ(param_of(R"("seed":"x")"), "seed");
  EXPECT_EQ(param_of(R"("chat_template_kwargs":[])"), "chat_template_kwargs");
  EXPECT_EQ(param_of(R"("logit_bias":{"x":1})"), "logit_bias");
  EXPECT_EQ(param_of(R"("logit_bias":{"1":101})"), "logit_bias");
  EXPECT_EQ(param_of(R"("top_logprobs":2)"), "top_logprobs");
  EXPECT_EQ(param_of(R"("logprobs":true,"top_logprobs":21)"), "top_logprobs");
  EXPECT_EQ(param_of(R"("best_of":2)"), "best_of");
  EXPECT_EQ(param_of(R"("response_format":{"type":"json"})"), "response_format");
  EXPECT_EQ(param_of(R"("tool_choice":"required")"), "tool_choice");
  EXPECT_EQ(param_of(R"("stop_token_ids":[-1])"), "stop_token_ids");
  EXPECT_EQ(param_of(R"("min_tokens":9,"max_tokens":8)"), "min_tokens");
  EXPECT_EQ(param_of(R"("regex":["a+"])"), "regex");
}

TEST(Schema, ChecksMessages) {
  EXPECT_EQ(chat_error(R"({})").param, "messages");
  EXPECT_EQ(chat_error(R"({"messages":[]})").param, "messages");
  EXPECT_EQ(chat_error(R"({"messages":["x"]})").param, "messages[0]");
  EXPECT_EQ(chat_error(R"({"messages":[{"role":"king","content":""}]})").param, "messages[0].role");
  EXPECT_EQ(chat_error(R"({"messages":[{"role":"user"}]})").param, "messages[0].content");
  EXPECT_EQ(chat_error(R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})").param,
            "messages[0].content");
  EXPECT_EQ(chat_error(R"({"messages":[{"role":"assistant","tool_calls":5}]})").param,
            "messages[0].tool_calls");
  const ParsedRequest parts = parse_chat_request(
      R"({"messages":[{"role":"user","content":[{"type":"text","text":"a"},
         {"type":"text","text":"b"}]}]})",
      {});
  const auto& messages = std::get<GenerationRequest>(parts).messages.as_array();
  EXPECT_EQ(messages[0].find("content")->as_string(), "ab");
}

TEST(Schema, NullMembersOfMessagesAreAbsent) {
  const auto messages = [](const std::string& list) {
    const ParsedRequest parsed = parse_chat_request("{\"messages\":" + list + "}", {});
    const auto* request = std::get_if<GenerationRequest>(&parsed);
    return request == nullptr ? std::get<ApiError>(parsed).param : request->messages.dump();
  };
  EXPECT_EQ(messages(R"([{"role":"user","content":"a","name":null}])"),
            R"([{"role":"user","content":"a"}])");
  EXPECT_EQ(messages(R"([{"role":"assistant","content":null,"tool_calls":null,"audio":null}])"),
            R"([{"role":"assistant","content":""}])");
  EXPECT_EQ(messages(R"([{"role":"assistant","content":null,"tool_calls":[{"id":null}]}])"),
            R"([{"role":"assistant","tool_calls":[{"id":null}],"content":""}])");
  EXPECT_EQ(messages(R"([{"role":"user","content":null,"tool_calls":null}])"),
            "messages[0].content");
  EXPECT_EQ(messages(R"([{"role":null,"content":"a"}])"), "messages[0].role");
  EXPECT_EQ(messages("[null]"), "messages[0]");
}

TEST(Schema, UnknownFieldsAreRefusedOnlyWhenStrict) {
  const std::string body = R"({"messages":[{"role":"user","content":"x"}],"wibble":1})";
  EXPECT_EQ(chat_error(body, Strictness::kStrict).param, "wibble");
  EXPECT_TRUE(std::holds_alternative<GenerationRequest>(parse_chat_request(body, {})));
}

TEST(Schema, NumbersThatAreNoneAreNoJson) {
  for (const char* value : {"NaN", "Infinity", "-Infinity", "1e999", "0x1", "01", "+1"}) {
    const ApiError error = chat_error(
        R"({"messages":[{"role":"user","content":"x"}],"temperature":)" + std::string(value) + "}");
    EXPECT_NE(error.message.find("JSON"), std::string::npos) << value;
  }
}

TEST(Schema, TakesSixteenStopStringsAndNoMore) {
  std::string list = "\"a\"";
  for (int i = 1; i < 16; ++i) {
    list += ",\"a\"";
  }
  EXPECT_EQ(chat(",\"stop\":[" + list + "]").stop.size(), 16U);
  EXPECT_EQ(param_of("\"stop\":[" + list + ",\"b\"]"), "stop");
}

TEST(Schema, TheServersTemplateArgumentsComeAfterTheRequests) {
  const SchemaOptions options{.template_arguments = *Json::parse(R"({"a":1,"b":2})")};
  const ParsedRequest parsed = parse_chat_request(
      R"({"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"b":3}})", options);
  EXPECT_EQ(std::get<GenerationRequest>(parsed).template_arguments.dump(), R"({"a":1,"b":3})");
}

TEST(Schema, RefusesWhatIsNoObject) {
  EXPECT_EQ(chat_error("{").status, 400);
  EXPECT_EQ(chat_error("[]").status, 400);
  EXPECT_NE(chat_error("{\"a\":}").message.find("JSON"), std::string::npos);
}

TEST(Schema, ReadsEveryFormOfPrompt) {
  const auto prompts = [](const std::string& prompt) {
    return std::get<GenerationRequest>(parse_completion_request("{\"prompt\":" + prompt + "}", {}))
        .prompts;
  };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(prompts("\"a\""), (std::vector<PromptInput>{"a"}));
  EXPECT_EQ(prompts(R"(["a","b"])"), (std::vector<PromptInput>{"a", "b"}));
  EXPECT_EQ(prompts("[1,2]"), (std::vector<PromptInput>{Ids{1, 2}}));
  EXPECT_EQ(prompts("[[1,2],[3]]"), (std::vector<PromptInput>{Ids{1, 2}, Ids{3}}));
  for (const char* bad : {R"({})", R"({"prompt":[]})", R"({"prompt":[[]]})",
                          R"({"prompt":[1,"a"]})", R"({"prompt":7})", R"({"prompt":[-1]})"}) {
    const ParsedRequest parsed = parse_completion_request(bad, {});
    ASSERT_TRUE(std::holds_alternative<ApiError>(parsed)) << bad;
    EXPECT_EQ(std::get<ApiError>(parsed).param, "prompt") << bad;
  }
}

}  // namespace
}  // namespace nibble
