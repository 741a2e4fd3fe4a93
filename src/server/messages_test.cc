#include <string>

#include "server/testing/app_fixture.h"
#include "server/testing/chat_bodies.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string chat_of(std::string_view body) {
  return chat_text(chat_of_messages(parsed(body), Strictness::kLenient));
}

/// What is wrong with a request that has these members, beside a message of a user.
ApiError error_of(const std::string& members) {
  return chat_error(
      chat_of_messages(parsed(R"({"messages":[{"role":"user","content":"hi"}],)" + members + "}"),
                       Strictness::kStrict),
      members);
}

std::string block_error(const std::string& role, const std::string& block) {
  const ApiError error = chat_error(chat_of_messages(parsed(R"({"messages":[{"role":")" + role +
                                                            R"(","content":[)" + block + "]}]}"),
                                                     Strictness::kStrict),
                                    block);
  return error.param + " | " + error.message;
}

TEST(ChatOfMessages, TurnsOfToolsBecomeMessagesOfTheirOwn) {
  EXPECT_EQ(
      chat_of(R"({"model":"m","max_tokens":5,"temperature":0.5,"top_k":3,"stream":true,
      "system":[{"type":"text","text":"Be kind.","cache_control":{"type":"ephemeral"}},
                {"type":"text","text":"Be short."}],
      "messages":[
        {"role":"user","content":"add"},
        {"role":"assistant","content":[
          {"type":"thinking","thinking":"hm","signature":"s"},
          {"type":"text","text":"Now."},
          {"type":"tool_use","id":"t1","name":"add","input":{"a":1}}]},
        {"role":"user","content":[
          {"type":"tool_result","tool_use_id":"t1","content":[{"type":"text","text":"2"}]},
          {"type":"tool_result","tool_use_id":"t2"},
          {"type":"text","text":"and "},{"type":"text","text":"then?"}]}],
      "stop_sequences":["x"],
      "tools":[{"name":"add","description":"adds","input_schema":{"type":"object"}},
               {"type":"web_search_20250305","name":"web_search"}],
      "tool_choice":{"type":"any","disable_parallel_tool_use":true},
      "thinking":{"type":"enabled","budget_tokens":1024}})"),
      R"({"messages":[{"role":"system","content":"Be kind.\nBe short."},)"
      R"({"role":"user","content":"add"},)"
      R"({"role":"assistant","content":"Now.","reasoning_content":"hm","reasoning":"hm",)"
      R"("tool_calls":[{"id":"t1","type":"function","function":{"name":"add",)"
      R"("arguments":"{\"a\":1}"}}]},)"
      R"({"role":"tool","tool_call_id":"t1","content":"2"},)"
      R"({"role":"tool","tool_call_id":"t2","content":""},)"
      R"({"role":"user","content":"and then?"}],)"
      R"("tools":[{"type":"function","function":{"name":"add","description":"adds",)"
      R"("parameters":{"type":"object"}}}],"tool_choice":"required","parallel_tool_calls":false,)"
      R"("thinking_token_budget":1024,)"
      R"("chat_template_kwargs":{"enable_thinking":true,"thinking":true},)"
      R"("include_reasoning":true,"stop":["x"],"model":"m","max_tokens":5,"stream":true,)"
      R"("temperature":0.5,"top_k":3})");
}

TEST(ChatOfMessages, ChoicesAndFormsAreThoseOfChats) {
  const auto with = [](const std::string& members) {
    return chat_of(R"({"messages":[{"role":"user","content":"hi"}],)" + members + "}");
  };
  EXPECT_THAT(with(R"("tool_choice":{"type":"tool","name":"add"})"),
              HasSubstr(R"("tool_choice":{"type":"function","function":{"name":"add"}})"));
  EXPECT_THAT(with(R"("tool_choice":{"type":"none"})"), HasSubstr(R"("tool_choice":"none")"));
  EXPECT_THAT(with(R"("thinking":{"type":"disabled"})"),
              HasSubstr(R"({"enable_thinking":false,"thinking":false},"include_reasoning":false)"));
  EXPECT_THAT(with(R"("thinking":{"type":"adaptive"},"output_config":{"effort":"low",)"
                   R"("format":{"type":"json_schema","schema":{"type":"object"}}})"),
              HasSubstr(R"("reasoning_effort":"low","response_format":{"type":"json_schema",)"
                        R"("json_schema":{"name":"answer","schema":{"type":"object"},)"
                        R"("strict":true}})"));
  EXPECT_THAT(chat_of(R"({"messages":[{"role":"user","content":"hi"},
                                      {"role":"assistant","content":"I am"}]})"),
              HasSubstr(R"("continue_final_message":true,"add_generation_prompt":false)"));
}

TEST(ChatOfMessages, TheBillingLineStaysOut) {
  EXPECT_EQ(without_billing_line("x-anthropic-billing-header: cch=1a2b;"), "");
  EXPECT_EQ(without_billing_line("x-anthropic-billing-header: cch=1a2b;\nYou help."), "You help.");
  EXPECT_EQ(without_billing_line("You help."), "You help.");
  const std::string user = R"("messages":[{"role":"user","content":"hi"}])";
  const std::string one =
      chat_of(R"({"system":[{"type":"text","text":"x-anthropic-billing-header: cch=1;"},
                            {"type":"text","text":"You help."}],)" +
              user + "}");
  const std::string other =
      chat_of(R"({"system":[{"type":"text","text":"x-anthropic-billing-header: cch=2;"},
                            {"type":"text","text":"You help."}],)" +
              user + "}");
  EXPECT_EQ(one, other);
  EXPECT_THAT(one, HasSubstr(R"({"role":"system","content":"You help."})"));
  EXPECT_THAT(chat_of(R"({"system":"x-anthropic-billing-header: a",)" + user + "}"),
              Not(HasSubstr("system")));
}

TEST(ChatOfMessages, ErrorsNameTheField) {
  EXPECT_THAT(block_error("user", R"({"type":"image","source":{"type":"base64","data":"AA"}})"),
              HasSubstr("messages[0].content[0] | messages[0].content[0]: blocks of the type "
                        "\"image\" are not supported here; send text or tool_result"));
  EXPECT_THAT(block_error("user", R"({"type":"tool_result","tool_use_id":"t","content":[
                                      {"type":"image"}]})"),
              HasSubstr("messages[0].content[0].content | "));
  EXPECT_THAT(block_error("assistant", R"({"type":"redacted_thinking","data":"x"})"),
              HasSubstr("text, thinking or tool_use"));
  EXPECT_THAT(block_error("assistant", R"({"type":"tool_use","id":"t","name":"f","input":"x"})"),
              HasSubstr("messages[0].content[0].input | "));
  EXPECT_THAT(block_error("user", R"({"type":"tool_result"})"), HasSubstr("tool_use_id"));
  EXPECT_THAT(block_error("user", "7"), HasSubstr("messages[0].content[0]"));
  EXPECT_THAT(block_error("tool", R"({"type":"text","text":"x"})"), HasSubstr("messages[0].role"));
  const std::string many(500, 'x');
  EXPECT_LT(block_error("user", R"({"type":")" + many + R"("})").size(), 250U);
  for (const auto& [members, param] : std::vector<std::pair<std::string, std::string>>{
           {R"("system":7)", "system"},
           {R"("system":[{"type":"image"}])", "system"},
           {R"("tools":{})", "tools"},
           {R"("tools":[7])", "tools[0]"},
           {R"("tools":[{"name":"f"}])", "tools[0].input_schema"},
           {R"("tools":[{"input_schema":{}}])", "tools[0].name"},
           {R"("tool_choice":"auto")", "tool_choice"},
           {R"("tool_choice":{"type":"tool"})", "tool_choice.name"},
           {R"("tool_choice":{"type":"auto","disable_parallel_tool_use":1})",
            "tool_choice.disable_parallel_tool_use"},
           {R"("thinking":{"type":"on"})", "thinking"},
           {R"("thinking":{"type":"enabled","budget_tokens":"x"})", "thinking.budget_tokens"},
           {R"("output_config":[])", "output_config"},
           {R"("output_config":{"effort":1})", "output_config.effort"},
           {R"("output_config":{"format":{"type":"x"}})", "output_config.format"},
           {R"("stop_sequences":"x")", "stop_sequences"},
           {R"("max_completion_tokens":1)", "max_completion_tokens"}}) {
    EXPECT_EQ(error_of(members).param, param);
  }
}

class MessagesTest : public AppTest {
 protected:
  MessagesTest() { form_ = {ReasoningForm::kThink, ToolForm::kHermes}; }

  std::string send(const std::string& content, const std::string& members) {
    return call("POST", "/v1/messages",
                R"({"messages":[{"role":"user","content":")" + content + "\"}]," + members + "}");
  }
};

// The fake says what it is told.
constexpr char kCall[] =
    R"(<think>\nhm\n</think>\n\nOne:\n<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}})"
    R"(</tool_call>$)";
constexpr char kTool[] = R"("tools":[{"name":"add","input_schema":{"type":"object"}}])";

TEST_F(MessagesTest, AnswersAreMessages) {
  const std::string answer = send("abc", R"("max_tokens":5)");
  EXPECT_THAT(answer, HasSubstr(R"("type":"message","role":"assistant","model":"fake",)"
                                R"("content":[{"type":"text","text":"abcab"}],)"
                                R"("stop_reason":"max_tokens","stop_sequence":null,)"));
  EXPECT_THAT(answer, HasSubstr(R"("usage":{"input_tokens":3,"output_tokens":5,)"
                                R"("cache_creation_input_tokens":0,"cache_read_input_tokens":0)"));
  EXPECT_THAT(send("ab$", R"("max_tokens":5)"), HasSubstr(R"("stop_reason":"end_turn")"));
  EXPECT_THAT(send("hello world", R"("max_tokens":50,"stop_sequences":[" w"])"),
              HasSubstr(R"([{"type":"text","text":"hello"}],"stop_reason":"stop_sequence",)"
                        R"("stop_sequence":" w")"));
  EXPECT_THAT(send("$", R"("max_tokens":5)"), HasSubstr(R"([{"type":"text","text":""}])"));
  EXPECT_THAT(send("abc", R"("max_tokens":100000)"),
              HasSubstr(R"("stop_reason":"model_context_window_exceeded")"));
}

TEST_F(MessagesTest, ThoughtsAndCallsAreBlocks) {
  const std::string answer = send(kCall, std::string(R"("max_tokens":500,)") + kTool);
  EXPECT_THAT(answer, HasSubstr(R"("content":[{"type":"thinking","thinking":"hm","signature":""},)"
                                R"({"type":"text","text":"One:"},{"type":"tool_use","id":"call_)"));
  EXPECT_THAT(answer, HasSubstr(R"("name":"add","input":{"a":1}}],"stop_reason":"tool_use")"));
  EXPECT_THAT(
      send(kCall, std::string(R"("max_tokens":500,"thinking":{"type":"disabled"},)") + kTool),
      Not(HasSubstr(R"("type":"thinking")")));
}

TEST_F(MessagesTest, StreamsHaveTheEventsInOrder) {
  const std::string answer = send(kCall, std::string(R"("max_tokens":500,"stream":true,)") + kTool);
  size_t at = 0;
  for (
      const char* part :
      {"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_",
       "event: ping\ndata: {\"type\":\"ping\"}\n\n",
       R"({"type":"content_block_start","index":0,"content_block":{"type":"thinking",)",
       R"({"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"h"}})",
       R"({"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"m"}})",
       R"({"type":"content_block_stop","index":0})",
       R"({"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}})",
       R"("delta":{"type":"text_delta","text":"O"})", R"({"type":"content_block_stop","index":1})",
       R"({"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"call_)",
       R"("name":"add","input":{}}})",
       R"("index":2,"delta":{"type":"input_json_delta","partial_json":"{\"a\":1}"}})",
       R"({"type":"content_block_stop","index":2})", "event: message_delta\ndata: {",
       R"("delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"input_tokens":)",
       "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"}) {
    at = answer.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << " in\n" << answer;
  }
  EXPECT_THAT(answer, Not(HasSubstr("[DONE]")));
}

TEST_F(MessagesTest, FieldsWithoutEffectAreNamedInAHeaderAndCounted) {
  const std::string members =
      R"("max_tokens":2,"metadata":{"user_id":"u"},"service_tier":"auto","betas":["x"],"wibble":1,)"
      R"("cache_control":{"type":"ephemeral"},"thinking":{"type":"adaptive","display":"omitted"},)"
      R"("output_config":{"task_budget":{"total":9}},)"
      R"("tools":[{"type":"web_search_20250305","name":"w"},{"type":"bash_20250124","name":"b"}])";
  const auto warns = HasSubstr(
      "X-Nibble-Warning: ignored: metadata, betas, tools[].type, thinking.display, "
      "output_config.task_budget; 1 unknown field\r\n");
  EXPECT_THAT(send("abc", members), warns);
  EXPECT_THAT(send("abc", members + R"(,"stream":true)"), warns);
  EXPECT_THAT(send("abc", R"("max_tokens":2,"service_tier":"standard_only")"),
              Not(HasSubstr("X-Nibble-Warning")));
  EXPECT_THAT(call("POST", "/v1/messages/count_tokens",
                   R"({"messages":[{"role":"user","content":"cde"}],"metadata":{"user_id":"u"}})"),
              HasSubstr("X-Nibble-Warning: ignored: metadata\r\n"));
  const std::string metrics = call("GET", "/metrics");
  EXPECT_THAT(metrics, HasSubstr(R"(field="metadata"} 3)"));
  EXPECT_THAT(metrics, HasSubstr(R"(field="tools[].type"} 2)"));
  EXPECT_THAT(metrics, HasSubstr("field=\"(unknown)\"} 2"));
  EXPECT_EQ(error_of(R"("metadata":{"user_id":"u"})").param, "metadata");
  EXPECT_EQ(error_of(R"("tools":[{"type":"web_search_20250305"}])").param, "tools[].type");
}

class PlainMessagesTest : public AppTest {};

TEST_F(PlainMessagesTest, ABudgetOfAModelThatMarksNoThoughtsIsIgnored) {
  EXPECT_THAT(call("POST", "/v1/messages",
                   R"({"messages":[{"role":"user","content":"a"}],"max_tokens":2,)"
                   R"("thinking":{"type":"enabled","budget_tokens":1024}})"),
              HasSubstr("X-Nibble-Warning: ignored: thinking.budget_tokens\r\n"));
}

TEST_F(MessagesTest, CountsTokens) {
  const std::string body = R"({"system":"ab","messages":[{"role":"user","content":"cde"}]})";
  EXPECT_THAT(call("POST", "/v1/messages/count_tokens", body), HasSubstr(R"({"input_tokens":5})"));
}

TEST_F(MessagesTest, ErrorsHaveTheShapeOfTheRoute) {
  const auto has = [](const std::string& type, const std::string& message) {
    return HasSubstr(R"({"type":"error","error":{"type":")" + type + R"(","message":")" + message);
  };
  EXPECT_THAT(send("abc", R"("top_k":1)"), has("invalid_request_error", "max_tokens: expected"));
  EXPECT_THAT(send("abc", R"("max_tokens":0)"),
              has("invalid_request_error", "max_tokens: must be"));
  EXPECT_THAT(send("abc", R"("max_tokens":5,"model":"nobody")"),
              has("not_found_error", "The model `nobody` does not exist"));
  EXPECT_THAT(send("refuse me", R"("max_tokens":5)"), HasSubstr("the template refuses"));
  EXPECT_THAT(call("POST", "/v1/messages", "{"), has("invalid_request_error", "the request body"));
  EXPECT_THAT(call("GET", "/v1/messages"), has("invalid_request_error", "/v1/messages takes POST"));
  EXPECT_THAT(call("POST", "/v1/messages", std::string(6000, ' ')),
              has("request_too_large", "the request body is larger"));
  EXPECT_THAT(call("POST", "/v1/messages", "{}", "Content-Encoding: gzip\r\n"),
              has("invalid_request_error", "Content-Encoding"));
  engine_.refuse(make_error(StatusCode::kResourceExhausted, "full"));
  EXPECT_THAT(send("abc", R"("max_tokens":5)"), has("rate_limit_error", "full"));
}

class KeyedMessagesTest : public AppTest {
 protected:
  KeyedMessagesTest() { keys_ = {{.key = "secret", .name = "key-1"}}; }
};

TEST_F(KeyedMessagesTest, TakesTheKeyInEitherHeader) {
  const std::string body = R"({"max_tokens":2,"messages":[{"role":"user","content":"abc"}]})";
  EXPECT_THAT(call("POST", "/v1/messages", body), HasSubstr("HTTP/1.1 401"));
  EXPECT_THAT(call("POST", "/v1/messages", body), HasSubstr(R"("type":"authentication_error")"));
  EXPECT_THAT(call("POST", "/v1/messages", body, "x-api-key: wrong\r\n"),
              HasSubstr("HTTP/1.1 401"));
  EXPECT_THAT(call("POST", "/v1/messages", body, "x-api-key: secret\r\n"), HasSubstr("200 OK"));
  EXPECT_THAT(call("POST", "/v1/messages", body, "Authorization: Bearer secret\r\n"),
              HasSubstr("200 OK"));
  EXPECT_THAT(call("GET", "/v1/models", "", "x-api-key: secret\r\n"), HasSubstr("200 OK"));
}

}  // namespace
}  // namespace nibble
