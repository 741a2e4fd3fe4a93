#include <string>

#include "server/chat_body.h"
#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class GenerateTest : public AppTest {
 protected:
  std::string send(const std::string& members) {
    return call("POST", "/generate", "{" + members + "}");
  }
  std::string param_of(const std::string& members) {
    const std::string answer = send(members);
    EXPECT_THAT(answer, HasSubstr("HTTP/1.1 400")) << members;
    const size_t at = answer.find(R"("param":")") + 9;
    return answer.substr(at, answer.find('"', at) - at);
  }
  /// An answer of 900 tokens under way in a stream.
  void begin(Client& client, const std::string& members) {
    const std::string body =
        R"({"text":"abc","stream":true,"sampling_params":{"max_new_tokens":900})" + members + "}";
    client.send("POST /generate HTTP/1.1\r\nConnection: close\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n\r\n" + body);
    client.read_until("data: ");
  }
};

TEST_F(GenerateTest, AnswersOnePromptWithAnObject) {
  const std::string answer =
      send(R"("text":"abc","rid":"r1","sampling_params":{"max_new_tokens":4,"temperature":0})");
  EXPECT_THAT(answer,
              HasSubstr(R"({"text":"abca","output_ids":[97,98,99,97],"meta_info":{"id":"r1",)"
                        R"("finish_reason":{"type":"length","length":4},"prompt_tokens":3,)"
                        R"("completion_tokens":4,"cached_tokens":0,)"
                        R"("weight_version":"default","e2e_latency":)"));
  EXPECT_THAT(answer, Not(HasSubstr("logprobs")));
  EXPECT_THAT(send(R"("input_ids":[97,36])"),
              HasSubstr(R"({"text":"a","output_ids":[97,256],"meta_info":{"id":")"));
  EXPECT_THAT(send(R"("text":"ab$")"), HasSubstr(R"({"type":"stop","matched":256})"));
  EXPECT_THAT(send(R"("text":"hello world","sampling_params":{"stop":" w"})"),
              HasSubstr(R"("finish_reason":{"type":"stop","matched":" w"})"));
  EXPECT_THAT(send(R"("text":"abc")"), HasSubstr(R"("completion_tokens":128)"));
}

TEST_F(GenerateTest, AnswersSeveralPromptsWithAnArray) {
  const std::string two =
      send(R"("text":["ab","cd"],"rid":"r","sampling_params":{"max_new_tokens":2})");
  EXPECT_THAT(two, HasSubstr(R"([{"text":"ab","output_ids":[97,98],"meta_info":{"id":"r_0")"));
  EXPECT_THAT(two, HasSubstr(R"({"text":"cd","output_ids":[99,100],"meta_info":{"id":"r_1")"));
  EXPECT_THAT(send(R"("input_ids":[[97]],"sampling_params":{"max_new_tokens":1})"),
              HasSubstr(R"([{"text":"a")"));
  EXPECT_THAT(send(R"("text":"ab","sampling_params":{"max_new_tokens":1,"n":2})"),
              HasSubstr(R"([{"text":"a")"));
}

TEST_F(GenerateTest, GivesLogprobsOfGeneratedTokens) {
  const std::string members =
      R"("text":"ab","return_logprob":true,"top_logprobs_num":2,"logprob_start_len":-1,)"
      R"("sampling_params":{"max_new_tokens":2})";
  const std::string all = R"("input_token_logprobs":[],"input_top_logprobs":[],)"
                          R"("output_token_logprobs":[[-0.5,97,null],)"
                          R"([-0.5,98,null]],"output_top_logprobs":)"
                          R"([[[-0.5,97,null],[-1.5,98,null]],[[-0.5,98,null],[-1.5,99,null]]])";
  EXPECT_THAT(send(members), HasSubstr(all));
  EXPECT_THAT(send(members + R"(,"stream":true)"), HasSubstr(all));
}

TEST_F(GenerateTest, GivesLogprobsOfPrompts) {
  const std::string members =
      R"("text":"abc","return_logprob":true,"sampling_params":{"max_new_tokens":1},)";
  EXPECT_THAT(send(members + R"("logprob_start_len":0)"),
              HasSubstr(R"("input_token_logprobs":[[null,97,null],[-0.25,98,null],)"
                        R"([-0.5,99,null]],"input_top_logprobs":[null,[],[]])"));
  EXPECT_THAT(send(members + R"("logprob_start_len":1,"top_logprobs_num":1)"),
              HasSubstr(R"("input_token_logprobs":[[null,98,null],[-0.5,99,null]],)"
                        R"("input_top_logprobs":[null,[[-0.375,100,null]]])"));
  EXPECT_THAT(send(members + R"("logprob_start_len":7)"),
              HasSubstr(R"("input_token_logprobs":[],"input_top_logprobs":[])"));
}

TEST_F(GenerateTest, EventsOfAStreamHoldAllOfTheText) {
  const std::string answer =
      send(R"("text":"xy","stream":true,"sampling_params":{"max_new_tokens":2})");
  size_t at = 0;
  for (const char* part :
       {"Content-Type: text/event-stream", R"(data: {"text":"x","output_ids":[120],)",
        R"("finish_reason":null)", R"(data: {"text":"xy","output_ids":[120,121],)",
        R"("finish_reason":{"type":"length","length":2})", "data: [DONE]\n\n"}) {
    at = answer.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << " in\n" << answer;
  }
  EXPECT_THAT(send(R"("text":["x","y"],"stream":true,"sampling_params":{"max_new_tokens":1})"),
              HasSubstr(R"("index":1})"));
}

TEST_F(GenerateTest, TakesWhatItsClientsSend) {
  EXPECT_THAT(send(R"("text":"abc","sampling_params":{"temperature":0.0,"max_new_tokens":2,)"
                   R"("ignore_eos":true},"stream":false,"lora_path":"","return_logprob":false,)"
                   R"("logprob_start_len":0,"image_data":null,"return_routed_experts":false)"),
              HasSubstr(R"("text":"ab")"));
}

TEST_F(GenerateTest, ErrorsNameTheField) {
  EXPECT_EQ(param_of(R"("stream":false)"), "text");
  EXPECT_EQ(param_of(R"("text":"a","input_ids":[1])"), "input_ids");
  EXPECT_EQ(param_of(R"("text":7)"), "text");
  EXPECT_EQ(param_of(R"("text":[7])"), "text");
  EXPECT_EQ(param_of(R"("text":[])"), "text");
  EXPECT_EQ(param_of(R"("input_ids":[-1])"), "input_ids");
  EXPECT_EQ(param_of(R"("input_ids":7)"), "input_ids");
  EXPECT_EQ(param_of(R"("text":"a","sampling_params":[])"), "sampling_params");
  EXPECT_EQ(param_of(R"("text":"a","sampling_params":{"stop_regex":"x"})"),
            "sampling_params.stop_regex");
  EXPECT_EQ(param_of(R"("text":"a","sampling_params":{"temperature":-1})"),
            "sampling_params.temperature");
  EXPECT_EQ(param_of(R"("text":"a","sampling_params":{"max_new_tokens":"x"})"),
            "sampling_params.max_new_tokens");
  EXPECT_EQ(param_of(R"("text":"a","return_logprob":true,"logprob_start_len":0,"stream":true)"),
            "logprob_start_len");
  EXPECT_EQ(param_of(R"("text":"a","lora_path":"x")"), "lora_path");
  EXPECT_EQ(param_of(R"("text":"a","rid":["x"])"), "rid");
  const ChatBody strict = completion_of_generate(
      Json::parse(R"({"text":"a","sampling_params":{"wibble":1}})").value(), Strictness::kStrict);
  ASSERT_TRUE(std::holds_alternative<ApiError>(strict));
  EXPECT_EQ(std::get<ApiError>(strict).param, "sampling_params.wibble");
}

TEST_F(GenerateTest, FieldsWithoutEffectAreNamed) {
  EXPECT_THAT(send(R"("text":"a","log_metrics":true,"return_text_in_logprobs":false,"wibble":1,)"
                   R"("sampling_params":{"max_new_tokens":1,"wobble":1,)"
                   R"("spaces_between_special_tokens":false})"),
              HasSubstr("X-Nibble-Warning: ignored: spaces_between_special_tokens, log_metrics; "
                        "2 unknown fields\r\n"));
}

TEST_F(GenerateTest, CanBeAborted) {
  Client one(server_->port());
  Client other(server_->port());
  begin(one, R"(,"rid":"r1")");
  begin(other, R"(,"rid":"r2")");
  EXPECT_THAT(call("GET", "/load"), HasSubstr(R"({"server_load":2,"num_reqs":2)"));
  EXPECT_THAT(call("GET", "/get_load"), HasSubstr(R"("num_waiting_reqs":0)"));
  EXPECT_THAT(call("POST", "/abort_request", R"({"rid":"r1"})"), HasSubstr(R"("aborted":1})"));
  EXPECT_THAT(one.read_until(""), HasSubstr(R"("finish_reason":{"type":"abort")"));
  EXPECT_TRUE(eventually([&] { return engine_.stats().running == 1; }));
  EXPECT_THAT(call("POST", "/abort_request", R"({"rid":"r1"})"), HasSubstr(R"("aborted":0})"));
  EXPECT_THAT(call("POST", "/abort_request", R"({"abort_all":true})"),
              HasSubstr(R"("aborted":1})"));
  EXPECT_THAT(other.read_until(""), HasSubstr("data: [DONE]"));
  EXPECT_THAT(call("POST", "/abort_request", "{}"), HasSubstr(R"("param":"rid")"));
  EXPECT_THAT(call("POST", "/abort_request", R"({"rid":7})"), HasSubstr("HTTP/1.1 400"));
}

TEST_F(GenerateTest, ChatsAreAbortedByTheirRequestId) {
  Client client(server_->port());
  const std::string body =
      R"({"messages":[{"role":"user","content":"abc"}],"stream":true,"max_tokens":900})";
  client.send(
      "POST /v1/chat/completions HTTP/1.1\r\nConnection: close\r\nX-Request-Id: mine\r\n"
      "Content-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body);
  client.read_until("data: ");
  EXPECT_THAT(call("POST", "/abort_request", R"({"rid":"mine"})"), HasSubstr(R"("aborted":1})"));
  EXPECT_THAT(client.read_until(""), HasSubstr(R"("finish_reason":"abort")"));
  EXPECT_THAT(call("GET", "/metrics"), HasSubstr(R"(finished_reason="abort"} 1)"));
}

TEST_F(GenerateTest, SmallRoutesAnswer) {
  for (const char* path : {"/model_info", "/get_model_info"}) {
    EXPECT_THAT(call("GET", path), HasSubstr(R"("served_model_name":"fake","is_generation":true)"));
  }
  for (const char* path : {"/server_info", "/get_server_info"}) {
    EXPECT_THAT(call("GET", path), HasSubstr(R"("internal_states":[{"num_running_reqs":0)"));
  }
  EXPECT_THAT(call("GET", "/flush_cache"), HasSubstr("200 OK"));
  EXPECT_THAT(call("POST", "/flush_cache"), HasSubstr("200 OK"));
  EXPECT_THAT(call("POST", "/reset_prefix_cache"), HasSubstr("200 OK"));
  EXPECT_EQ(engine_.forgotten, 3);
  EXPECT_THAT(call("POST", "/start_profile"), HasSubstr("no profiler"));
  EXPECT_THAT(call("POST", "/stop_profile"), HasSubstr("HTTP/1.1 400"));
  EXPECT_THAT(call("GET", "/health_generate"), HasSubstr(R"({"status":"ok"})"));
  engine_.refuse(make_error(StatusCode::kUnavailable, "broken"));
  EXPECT_THAT(call("GET", "/health_generate"), HasSubstr("HTTP/1.1 503"));
}

}  // namespace
}  // namespace nibble
