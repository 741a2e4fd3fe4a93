#include "server/app.h"

#include <string>

#include "server/metrics.h"
#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(AppTest, AnswersAChat) {
  const std::string answer = chat("abc", R"("max_tokens":5,"logprobs":true,"top_logprobs":2)");
  EXPECT_THAT(answer, HasSubstr("HTTP/1.1 200 OK"));
  EXPECT_THAT(answer, HasSubstr(R"("content":"abcab")"));
  EXPECT_THAT(answer, HasSubstr(R"("finish_reason":"length")"));
  EXPECT_THAT(answer, HasSubstr(R"({"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[)"));
  EXPECT_THAT(answer, HasSubstr(R"("prompt_tokens":3,"completion_tokens":5,"total_tokens":8)"));
}

constexpr char kTools[] =
    R"("tools":[{"type":"function","function":{"name":"add","parameters":{"type":"object"}}}])";

TEST_F(AppTest, ToolsReachTheTemplateAndMayBeRefused) {
  const std::string tools = std::string(R"("max_tokens":4,)") + kTools;
  const std::string answer = chat("abc", tools);
  EXPECT_THAT(answer, HasSubstr(R"("content":"abc1")"));  // the fake's template counts tools
  EXPECT_THAT(answer, Not(HasSubstr("tool_calls")));
  EXPECT_THAT(chat("abc", tools + R"(,"tool_choice":"none")"), HasSubstr(R"("content":"abca")"));
  EXPECT_THAT(chat("abc", tools + R"(,"tool_choice":"required")"),  // no form of calls is known
              HasSubstr(R"("param":"tool_choice")"));
  EXPECT_THAT(chat("abc", R"("tools":[{"type":"function","function":{"name":""}}])"),
              HasSubstr(R"("param":"tools[0].function.name")"));
  const std::string one = R"({"type":"function","function":{"name":"add"}})";
  EXPECT_THAT(chat("abc", R"("tools":[)" + one + "," + one + "]"),
              HasSubstr("another tool has this name"));
  EXPECT_THAT(chat("abc", R"("tools":[{"type":"web_search"}])"),
              HasSubstr(R"("param":"tools[0].type")"));
}

class ToolsTest : public AppTest {
 protected:
  ToolsTest() { form_ = {ReasoningForm::kThink, ToolForm::kHermes}; }
};

// The fake says what it is told.
constexpr char kCalls[] =
    R"(<think>\nhm\n</think>\n\nTwo:\n<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}})"
    R"(</tool_call><tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 2}}</tool_call>$)";

TEST_F(ToolsTest, AnswersAreTakenApart) {
  const std::string answer = chat(kCalls, kTools);
  EXPECT_THAT(answer, HasSubstr(R"("content":"Two:","refusal":null,"reasoning_content":"hm",)"
                                R"("reasoning":"hm","tool_calls":[{"id":"call_)"));
  EXPECT_THAT(answer, HasSubstr(R"("function":{"name":"add","arguments":"{\"a\":1}"}})"));
  EXPECT_THAT(answer, HasSubstr(R"("function":{"name":"add","arguments":"{\"a\":2}"}}])"));
  EXPECT_THAT(answer, HasSubstr(R"("finish_reason":"tool_calls")"));
  EXPECT_THAT(answer, HasSubstr(R"("reasoning_tokens":11})"));  // bytes of "\nhm\n</think"
  const std::string first = chat(kCalls, kTools + std::string(R"(,"parallel_tool_calls":false)"));
  EXPECT_THAT(first, HasSubstr(R"("arguments":"{\"a\":1}"}}])"));
  EXPECT_THAT(chat(kCalls, R"("include_reasoning":false)"),
              HasSubstr(R"("reasoning_content":null,"reasoning":null)"));
  EXPECT_THAT(chat(kCalls, R"("separate_reasoning":false)"),
              HasSubstr(R"("content":"<think>\nhm\n</think>)"));
}

TEST_F(ToolsTest, ThoughtsEndWithTheirBudget) {
  const std::string answer = chat("<think>abcdefgh</think>done$", R"("thinking_token_budget":3)");
  EXPECT_THAT(answer, HasSubstr(R"("reasoning_content":"abc")"));
  EXPECT_THAT(chat("x", R"("thinking_token_budget":3,"allowed_token_ids":[97])"),
              HasSubstr(R"("param":"thinking_token_budget")"));
}

TEST_F(AppTest, BudgetsNeedThoughts) {
  EXPECT_THAT(chat("x", R"("thinking_token_budget":3)"), HasSubstr("no marked thoughts"));
}

TEST_F(ToolsTest, StreamsAreTheSame) {
  const std::string answer = chat(kCalls, kTools + std::string(R"(,"stream":true)"));
  size_t at = 0;
  for (const char* part :
       {R"("delta":{"reasoning_content":"h","reasoning":"h"})",
        R"("delta":{"reasoning_content":"m","reasoning":"m"})", R"("delta":{"content":"T"})",
        R"("delta":{"tool_calls":[{"id":"call_)",
        R"("type":"function","function":{"name":"add","arguments":""},"index":0}]})",
        R"("delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\":1}"}}]})",
        R"("index":1}]})",
        R"("delta":{"tool_calls":[{"index":1,"function":{"arguments":"{\"a\":2}"}}]})",
        R"("delta":{},"logprobs":null,"finish_reason":"tool_calls")", "data: [DONE]"}) {
    at = answer.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << " in\n" << answer;
  }
  EXPECT_THAT(answer, Not(HasSubstr("tool_call>")));
}

TEST_F(ToolsTest, ReasoningEffortReachesTheTemplate) {
  EXPECT_THAT(chat("abc", R"("max_tokens":4,"reasoning_effort":"high")"), HasSubstr("abca"));
  EXPECT_THAT(chat("abc", R"("reasoning_effort":"huge")"),
              HasSubstr(R"("param":"reasoning_effort")"));
}

TEST_F(AppTest, EndsAtStopStringsAndEndTokens) {
  EXPECT_THAT(chat("hello world", R"("stop":" w")"), HasSubstr(R"("content":"hello")"));
  EXPECT_THAT(chat("hi$", R"("n":2)"), HasSubstr(R"("index":1,"message":{"role":"assistant",)"
                                                 R"("content":"hi")"));
  EXPECT_TRUE(eventually([&] { return engine_.stats().running == 0; }));
}

TEST_F(AppTest, StreamsInTheDocumentedOrder) {
  const std::string answer =
      chat("xy", R"("max_tokens":2,"stream":true,"stream_options":{"include_usage":true})");
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/event-stream"));
  size_t at = 0;
  for (const char* part :
       {R"("delta":{"role":"assistant","content":""})", R"("delta":{"content":"x"})",
        R"("delta":{"content":"y"})", R"("delta":{},"logprobs":null,"finish_reason":"length")",
        R"("choices":[],"usage":{"prompt_tokens":2,)", "data: [DONE]\n\n", "0\r\n\r\n"}) {
    at = answer.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << " in\n" << answer;
  }
}

TEST_F(AppTest, StreamsLogprobsOfEachTokenOnce) {
  const std::string answer =
      chat("xy", R"("max_tokens":2,"stream":true,"logprobs":true,"top_logprobs":1)");
  EXPECT_THAT(answer, HasSubstr(R"("delta":{"content":"x"},"logprobs":{"content":[{"token":"x",)"));
  EXPECT_THAT(answer, HasSubstr(R"("delta":{"content":"y"},"logprobs":{"content":[{"token":"y",)"));
  EXPECT_THAT(answer, HasSubstr(R"("delta":{},"logprobs":null,"finish_reason":"length")"));
  // Tokens without text of their own come with the next event: here a stop string, held back.
  const std::string stopped =
      chat("abc", R"("max_tokens":9,"stream":true,"logprobs":true,"stop":["bcx","ca"])");
  EXPECT_THAT(stopped, HasSubstr(R"("delta":{"content":"a"},"logprobs":{"content":[{"token":"a")"));
  EXPECT_THAT(stopped, HasSubstr(R"("delta":{"content":"b"},"logprobs":{"content":[{"token":"b")"));
  EXPECT_THAT(stopped, HasSubstr(R"("stop_reason":"ca")"));
}

TEST_F(AppTest, StreamsWholeCharactersOfTokensThatAreBytes) {
  const std::string text = "\u00e9\u6f22\U0001f600!";  // 2, 3, 4 and 1 bytes
  const std::string answer =
      call("POST", "/v1/completions",
           R"({"prompt":")" + text + R"(","max_tokens":10,"stream":true,)" + R"("logprobs":0})");
  std::string joined;
  int events = 0;
  for (size_t at = 0; (at = answer.find("data: {", at)) != std::string::npos; ++events) {
    const auto event = Json::parse(answer.substr(at + 6, answer.find("\n\n", at) - at - 6));
    ASSERT_TRUE(event.ok()) << event.status().message();  // refuses invalid UTF-8
    joined += event->find("choices")->as_array()[0].find("text")->as_string();
    at += 6;
  }
  EXPECT_EQ(joined, text);
  EXPECT_EQ(events, 5);  // one for each character, and the end
  EXPECT_THAT(answer, HasSubstr(R"("tokens":["bytes:\\xc3","bytes:\\xa9"])"));
  // Cut inside a character: what is left of it becomes U+FFFD.
  EXPECT_THAT(call("POST", "/v1/completions", R"({"prompt":"\u00e9","max_tokens":3})"),
              HasSubstr("\"text\":\"\u00e9\ufffd\""));
}

TEST_F(AppTest, AnswersCompletionsOfSeveralPrompts) {
  const std::string answer =
      call("POST", "/v1/completions", R"({"prompt":["ab","cd"],"max_tokens":3,"echo":true})");
  EXPECT_THAT(answer, HasSubstr(R"("index":0,"text":"ababa")"));
  EXPECT_THAT(answer, HasSubstr(R"("index":1,"text":"cdcdc")"));
  EXPECT_THAT(call("POST", "/v1/completions", R"({"prompt":[97],"max_tokens":2,"logprobs":1})"),
              HasSubstr(R"("tokens":["a","a"],"token_logprobs":[-0.5,-0.5],"top_logprobs":)"
                        R"([{"a":-0.5},{"a":-0.5}],"text_offset":[0,1])"));
}

TEST_F(AppTest, EveryFailureIsAnErrorObject) {
  const auto expect = [](const std::string& answer, const char* status, const char* part) {
    EXPECT_THAT(answer, HasSubstr("HTTP/1.1 " + std::string(status)));
    EXPECT_THAT(answer, HasSubstr(R"({"error":{"message":)"));
    EXPECT_THAT(answer, HasSubstr(part));
  };
  expect(call("GET", "/nowhere"), "404", R"("type":"not_found_error")");
  expect(call("GET", "/v1/completions"), "405", "Allow: POST");
  expect(call("POST", "/v1/chat/completions", "{\"a\""), "400", "not valid JSON");
  expect(call("POST", "/v1/chat/completions", std::string(6000, 'x')), "413", "5000 bytes");
  expect(chat("x", R"("model":"other")"), "404", R"("code":"model_not_found")");
  expect(chat(std::string(1200, 'x'), R"("n":1)"), "400", R"("code":"context_length_exceeded")");
  expect(chat(std::string(1200, 'x'), R"("n":1)"), "400", "(1200 in the prompt, 1 for the answer)");
  expect(chat("x", R"("max_tokens":2000)"), "400", R"("code":"context_length_exceeded")");
  expect(chat("refuse me", R"("n":1)"), "400", "the template refuses");
  expect(call("BREW", "/v1/models"), "405", "error");
  expect(call("GET", "/v1/models/none"), "404", "model_not_found");
  expect(chat("", R"("n":1)"), "400", R"("param":"messages")");
  expect(chat("x", R"("logit_bias":{"300":1})"), "400", R"("param":"logit_bias")");
  expect(chat("x", R"("stop_token_ids":[257])"), "400", R"("param":"stop_token_ids")");
  expect(chat("x", R"("n":101)"), "400", R"("param":"n")");
  expect(call("POST", "/v1/completions", R"({"prompt":[1,300]})"), "400", R"("param":"prompt")");
  expect(call("POST", "/v1/completions", R"({"prompt":["a","b"],"n":51})"), "400",
         R"("param":"prompt")");
  engine_.refuse(Status(StatusCode::kResourceExhausted, "full"));
  expect(chat("x", R"("n":1)"), "429", "Retry-After: 1");
  engine_.refuse(Status(StatusCode::kUnavailable, "going down"));
  expect(chat("x", R"("n":1)"), "503", R"("type":"unavailable_error")");
  engine_.refuse(Status(StatusCode::kIo, "broken"));
  expect(chat("x", R"("stream":true)"), "500", R"("type":"server_error")");
}

TEST_F(AppTest, AStreamMaySendSeveralTokensAtATime) {
  context_ = std::make_unique<AppContext>(AppOptions{.model_names = {"fake"}, .stream_interval = 4},
                                          engine_, text_);
  gate_.open(*context_);
  const std::string answer =
      call("POST", "/v1/completions", R"({"prompt":"abc","max_tokens":6,"stream":true})");
  size_t at = 0;
  for (const char* text : {R"("text":"a")", R"("text":"bcab")", R"("text":"c")"}) {
    at = answer.find(text, at);
    EXPECT_NE(at, std::string::npos) << text << " in\n" << answer;
  }
}

TEST_F(AppTest, KeepsConnectionsAndReturnsTheRequestId) {
  Client client(server_->port());
  for (int i = 0; i < 3; ++i) {
    client.send("GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: id-" + std::to_string(i) +
                "\r\n\r\n");
    EXPECT_THAT(client.read_until("ok\"}"), HasSubstr("X-Request-Id: id-" + std::to_string(i)));
  }
  client.send("GET /health HTTP/1.1\r\n\r\nGET /version HTTP/1.1\r\n\r\n");  // pipelined
  EXPECT_THAT(client.read_until("version"), HasSubstr("version"));
}

TEST_F(AppTest, NoEventComesBeforeTheFirstToken) {
  constexpr auto kPause = std::chrono::milliseconds(100);
  engine_.held = true;
  Client client(server_->port());
  const std::string body = R"({"messages":[{"role":"user","content":"a"}],"stream":true})";
  client.send("POST /v1/chat/completions HTTP/1.1\r\nContent-Length: " +
              std::to_string(body.size()) + "\r\n\r\n" + body);
  const auto sent = std::chrono::steady_clock::now();
  std::thread later([&] {
    std::this_thread::sleep_for(kPause);
    engine_.held = false;
  });
  EXPECT_THAT(client.read_until("data: "), HasSubstr("data: "));
  EXPECT_GE(std::chrono::steady_clock::now() - sent, kPause);
  later.join();
}

TEST_F(AppTest, ADroppedClientCancelsItsRequest) {
  {
    Client client(server_->port());
    const std::string body = R"({"prompt":"abc","max_tokens":900,"stream":true})";
    client.send("POST /v1/completions HTTP/1.1\r\nContent-Length: " + std::to_string(body.size()) +
                "\r\n\r\n" + body);
    EXPECT_THAT(client.read_until("data: "), HasSubstr("data: "));
    EXPECT_EQ(engine_.stats().running, 1);
  }
  const auto dropped = std::chrono::steady_clock::now();
  EXPECT_TRUE(eventually([&] { return engine_.stats().running == 0; }));
  EXPECT_LT(std::chrono::steady_clock::now() - dropped, std::chrono::milliseconds(300));
  EXPECT_TRUE(eventually([&] {
    return call("GET", "/metrics").find("finished_reason=\"abort\"} 1") != std::string::npos;
  }));
}

TEST_F(AppTest, DrainFinishesWhatRunsAndTakesNothingNew) {
  Client client(server_->port());
  begin_stream(client, 200);
  context_->ready = false;
  server_->begin_drain();
  EXPECT_THAT(call("GET", "/health"), HasSubstr("HTTP/1.1 503"));
  EXPECT_THAT(chat("x", R"("n":1)"), HasSubstr(R"("type":"unavailable_error")"));
  EXPECT_THAT(call("GET", "/metrics"), HasSubstr("HTTP/1.1 200"));
  EXPECT_THAT(client.read_until("[DONE]"), HasSubstr("[DONE]"));
  server_->stop_listening();
  EXPECT_TRUE(server_->wait_idle(5));
  EXPECT_TRUE(eventually([&] { return !Client(server_->port()).connected(); }));
}

class LoadingTest : public AppTest {
 protected:
  LoadingTest() { loading_ = true; }
};

TEST_F(LoadingTest, IsUnavailableUntilTheModelIsThere) {
  for (const char* path : {"/health", "/ready", "/v1/models", "/metrics"}) {
    const std::string answer = call("GET", path);
    EXPECT_THAT(answer, HasSubstr("HTTP/1.1 503")) << path;
    EXPECT_THAT(answer, HasSubstr(R"("type":"unavailable_error")")) << path;
  }
  EXPECT_THAT(chat("x", R"("n":1)"), HasSubstr("the model is being loaded"));
  EXPECT_THAT(call("GET", "/version"), HasSubstr(R"({"version":"1"})"));
  ASSERT_TRUE(prove_engine(engine_).ok());
  gate_.open(*context_);
  EXPECT_THAT(call("GET", "/health"), HasSubstr("HTTP/1.1 200"));
  EXPECT_THAT(chat("ab", R"("max_tokens":2)"), HasSubstr(R"("content":"ab")"));
}

TEST_F(LoadingTest, AnEngineThatFailsIsFoundOutAtOnce) {
  engine_.refuse(Status(StatusCode::kUnavailable, "broken"));
  EXPECT_EQ(prove_engine(engine_).code(), StatusCode::kUnavailable);
}

TEST_F(AppTest, APortInUseIsAClearError) {
  HttpOptions options;
  options.port = server_->port();
  const auto second = HttpServer::start(options, {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), StatusCode::kIo);
  EXPECT_THAT(second.status().message(), HasSubstr("port " + std::to_string(options.port)));
}

TEST_F(AppTest, TokenizesBothWays) {
  EXPECT_THAT(call("POST", "/tokenize", R"({"prompt":"ab"})"), HasSubstr(R"("tokens":[97,98])"));
  EXPECT_THAT(call("POST", "/detokenize", R"({"tokens":[97,98]})"), HasSubstr(R"("prompt":"ab")"));
  EXPECT_THAT(call("POST", "/detokenize", R"({"tokens":[97],"model":null})"), HasSubstr("200 OK"));
  EXPECT_THAT(call("POST", "/detokenize", R"({"tokens":[97],"model":"other"})"),
              HasSubstr("model_not_found"));
  EXPECT_THAT(call("POST", "/detokenize", R"({"tokens":[257]})"),
              HasSubstr("\"param\":\"tokens\""));
  EXPECT_THAT(call("POST", "/detokenize", R"({"tokens":"x"})"), HasSubstr("\"param\":\"tokens\""));
}

TEST_F(AppTest, ReportsTheMetricsThatDashboardsKnow) {
  chat("abc", R"("max_tokens":5,"n":2)");
  const std::string text = call("GET", "/metrics");
  const std::string labels = R"({model_name="fake",engine="0")";
  for (const char* gauge :
       {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prompt_tokens_total", "generation_tokens_total", "prompt_tokens_cached_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"}) {
    EXPECT_THAT(text, HasSubstr("\nvllm:" + std::string(gauge) + labels + "} ")) << gauge;
  }
  EXPECT_THAT(text, HasSubstr("vllm:num_requests_waiting_by_reason" + labels + R"(,reason="capa)"));
  EXPECT_THAT(text, HasSubstr("vllm:prompt_tokens_by_source_total" + labels + R"(,source="local)"));
  EXPECT_THAT(text, HasSubstr(R"(cache_dtype="bf16"} 1)"));
  EXPECT_THAT(text, HasSubstr(R"(,finished_reason="length"} 2)"));
  for (const char* histogram :
       {"time_to_first_token_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_params_max_tokens", "request_params_n",
        "request_prefill_kv_computed_tokens"}) {
    EXPECT_THAT(text, HasSubstr("vllm:" + std::string(histogram) + "_count" + labels + "} 2"))
        << histogram;
  }
  EXPECT_THAT(text, HasSubstr("vllm:inter_token_latency_seconds_count" + labels + "} 8"));
  EXPECT_THAT(text, HasSubstr("vllm:request_generation_tokens_sum" + labels + "} 10"));
}

// Layers with windows have pages of their own: the fullest pool says how full the cache is.
TEST(ServerMetrics, CountPagesByPool) {
  EngineStats stats{.pools = {{.window = 0, .pages_total = 400, .pages_used = 100},
                              {.window = 512, .pages_total = 40, .pages_used = 30}},
                    .pages_total = 440,
                    .pages_used = 130};
  const ServerMetrics metrics(64);
  const std::string text = metrics.render(stats, {}, "m");
  const std::string labels = R"({model_name="m",engine="0")";
  EXPECT_THAT(text, HasSubstr("\nvllm:kv_cache_usage_perc" + labels + "} 0.75\n"));
  EXPECT_THAT(text, HasSubstr("\nnibble:kv_cache_pages_total" + labels + "} 440\n"));
  const std::string pool = R"(,pool="1",window="512"} )";
  EXPECT_THAT(text, HasSubstr("\nnibble:kv_cache_pool_pages_used" + labels + pool + "30\n"));
  EXPECT_THAT(text, HasSubstr("\nnibble:kv_cache_pool_pages_total" + labels + pool + "40\n"));
  stats.pools.pop_back();
  EXPECT_THAT(metrics.render(stats, {}, "m"), Not(HasSubstr("pool=")));
}

TEST(ServerMetrics, CountExpertsWhereThereAreSome) {
  const ServerMetrics metrics(64);
  EngineStats stats;
  EXPECT_THAT(metrics.render(stats, {}, "m"), Not(HasSubstr("nibble:expert")));
  stats.experts = {.runs = 4, .active = 12, .slots = 48, .rows_max = 24};
  const std::string text = metrics.render(stats, {}, "m");
  const std::string labels = R"({model_name="m",engine="0"} )";
  EXPECT_THAT(text, HasSubstr("\nnibble:expert_layer_runs_total" + labels + "4\n"));
  EXPECT_THAT(text, HasSubstr("\nnibble:expert_active_total" + labels + "12\n"));
  EXPECT_THAT(text, HasSubstr("\nnibble:expert_slots_total" + labels + "48\n"));
  EXPECT_THAT(text, HasSubstr("\nnibble:expert_rows_max_total" + labels + "24\n"));
}

class KeyTest : public AppTest {
 protected:
  KeyTest() { keys_ = {{.key = "secret", .name = "key-1"}}; }
};

TEST_F(KeyTest, AsksForTheKey) {
  EXPECT_THAT(call("GET", "/v1/models"), HasSubstr("HTTP/1.1 401"));
  EXPECT_THAT(call("GET", "/v1/models", "", "Authorization: Bearer wrong!\r\n"),
              HasSubstr(R"("type":"authentication_error")"));
  EXPECT_THAT(call("POST", "/v1/completions", "{", "Authorization: Bearer secret2\r\n"),
              HasSubstr("HTTP/1.1 401"));
  EXPECT_THAT(call("GET", "/nowhere"), HasSubstr("HTTP/1.1 401"));
  EXPECT_THAT(call("GET", "/v1/models", "", "authorization: bearer secret\r\n"),
              HasSubstr(R"("id":"fake")"));
  EXPECT_THAT(call("GET", "/health"), HasSubstr("200 OK"));
}

}  // namespace
}  // namespace nibble
