#include <string>

#include "server/response_store.h"
#include "server/testing/app_fixture.h"
#include "server/testing/chat_bodies.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string chat_of(std::string_view body) {
  return chat_text(chat_of_responses(parsed(body), {}, Strictness::kLenient));
}

ApiError error_of(const std::string& body) {
  return chat_error(chat_of_responses(parsed(body), {}, Strictness::kStrict), body);
}

TEST(ChatOfResponses, ItemsOfATurnAreOneMessage) {
  EXPECT_EQ(
      chat_of(R"({"model":"m","instructions":"Be kind.","max_output_tokens":9,"temperature":0,
      "reasoning":{"effort":"low","summary":"auto"},"tool_choice":"required","store":false,
      "parallel_tool_calls":false,"include":["reasoning.encrypted_content"],
      "input":[
        {"role":"developer","content":"Be short."},
        {"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"dd"}]},
        {"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},
        {"type":"message","role":"assistant","content":[{"type":"output_text","text":"Now."}]},
        {"type":"function_call","call_id":"c1","name":"add","arguments":"{\"a\":1}"},
        {"type":"function_call","call_id":"c2","name":"add","arguments":"{}"},
        {"type":"function_call_output","call_id":"c1","output":"2"},
        {"type":"function_call_output","call_id":"c2","output":[{"type":"input_text","text":"0"}]},
        {"type":"reasoning","encrypted_content":"x","summary":[]},
        {"role":"assistant","content":"Two."},
        {"role":"assistant","content":"Or none."},
        {"role":"user","content":"why?"}],
      "tools":[{"type":"function","name":"add","description":null,"parameters":{"type":"object"},
                "strict":true},{"type":"web_search"}],
      "text":{"format":{"type":"json_schema","name":"n","schema":{"type":"object"},"strict":true}}})"),
      R"({"messages":[{"role":"system","content":"Be kind."},)"
      R"({"role":"system","content":"Be short."},{"role":"user","content":"add"},)"
      R"({"role":"assistant","content":"Now.","reasoning_content":"hm","reasoning":"hm",)"
      R"("tool_calls":[{"id":"c1","type":"function","function":{"name":"add","arguments":)"
      R"("{\"a\":1}"}},{"id":"c2","type":"function","function":{"name":"add","arguments":"{}"}}]},)"
      R"({"role":"tool","tool_call_id":"c1","content":"2"},)"
      R"({"role":"tool","tool_call_id":"c2","content":"0"},)"
      R"({"role":"assistant","content":"Two."},{"role":"assistant","content":"Or none."},)"
      R"({"role":"user","content":"why?"}],)"
      R"("tools":[{"type":"function","function":{"name":"add","parameters":{"type":"object"},)"
      R"("strict":true}}],"tool_choice":"required","response_format":{"type":"json_schema",)"
      R"("json_schema":{"name":"n","schema":{"type":"object"},"strict":true}},)"
      R"("max_completion_tokens":9,"reasoning_effort":"low","model":"m","temperature":0,)"
      R"("parallel_tool_calls":false})");
  EXPECT_THAT(chat_of(R"({"input":"hi","tool_choice":{"type":"function","name":"add"}})"),
              HasSubstr(R"({"messages":[{"role":"user","content":"hi"}],"tool_choice":)"
                        R"({"type":"function","function":{"name":"add"}})"));
}

TEST(ChatOfResponses, ErrorsNameTheField) {
  for (const auto& [members, param] : std::vector<std::pair<std::string, std::string>>{
           {R"("input":7)", "input"},
           {R"("model":"m")", "input"},
           {R"("input":[7])", "input[0]"},
           {R"("input":[{"type":"image_generation_call"}])", "input[0]"},
           {R"("input":[{"type":"item_reference","id":"x"}])", "input[0]"},
           {R"("input":[{"role":"tool","content":"x"}])", "input[0].role"},
           {R"("input":[{"role":"user"}])", "input[0].content"},
           {R"("input":[{"role":"user","content":[{"type":"input_image"}]}])", "input[0].content"},
           {R"("input":[{"type":"function_call","name":"f","arguments":"{}"}])",
            "input[0].call_id"},
           {R"("input":[{"type":"function_call_output","call_id":"c"}])", "input[0].output"},
           {R"("input":"x","background":true)", "background"},
           {R"("input":"x","conversation":"c")", "conversation"},
           {R"("input":"x","prompt":{"id":"p"})", "prompt"},
           {R"("input":"x","truncation":"auto")", "truncation"},
           {R"("input":"x","top_logprobs":2)", "top_logprobs"},
           {R"("input":"x","include":["message.output_text.logprobs"])", "include"},
           {R"("input":"x","tools":7)", "tools"},
           {R"("input":"x","tools":[{"type":"function"}])", "tools[0].name"},
           {R"("input":"x","tool_choice":{"type":"web_search"})", "tool_choice"},
           {R"("input":"x","text":7)", "text"},
           {R"("input":"x","reasoning":7)", "reasoning"},
           {R"("input":"x","max_tokens":7)", "max_tokens"}}) {
    EXPECT_EQ(error_of("{" + members + "}").param, param) << members;
  }
  const std::string many(500, 'x');
  EXPECT_LT(error_of(R"({"input":[{"type":")" + many + R"("}]})").message.size(), 250U);
}

TEST(ResponseStore, ForgetsTheOldestFirst) {
  ResponseStore store({.count = 2, .bytes = 100});
  store.put("a", {.response = "1", .items = "[]"});
  store.put("b", {.response = "2", .items = "[]"});
  store.put("a", {.response = "3", .items = ""});  // is the newest now
  store.put("c", {.response = "4", .items = ""});
  EXPECT_FALSE(store.find("b"));
  ASSERT_TRUE(store.find("a"));
  EXPECT_EQ(store.find("a")->response, "3");
  EXPECT_EQ(store.bytes(), 4U);
  store.put("d", {.response = std::string(97, 'x'), .items = ""});
  EXPECT_FALSE(store.find("a"));
  EXPECT_TRUE(store.find("c") && store.find("d"));
  store.put("e", {.response = std::string(100, 'x'), .items = ""});  // larger than all may be
  EXPECT_TRUE(store.find("c") && store.find("d") && !store.find("e"));
  EXPECT_TRUE(store.erase("d"));
  EXPECT_FALSE(store.erase("d"));
  EXPECT_EQ(store.bytes(), 2U);
}

class ResponsesTest : public AppTest {
 protected:
  ResponsesTest() { form_ = {ReasoningForm::kThink, ToolForm::kHermes}; }

  std::string send(const std::string& input, const std::string& members = R"("user":"u")") {
    return call("POST", "/v1/responses", R"({"input":")" + input + "\"," + members + "}");
  }
  static std::string id_of(const std::string& answer) {
    const size_t at = answer.find("resp_");
    return answer.substr(at, answer.find('"', at) - at);
  }
};

// The fake says what it is told.
constexpr char kCall[] =
    R"(<think>\nhm\n</think>\n\nOne:\n<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}})"
    R"(</tool_call>$)";
constexpr char kTool[] = R"("tools":[{"type":"function","name":"add","parameters":{}}])";

TEST_F(ResponsesTest, AnswersHaveItems) {
  const std::string answer = send(kCall, kTool);
  const std::string id = id_of(answer);
  EXPECT_THAT(answer,
              HasSubstr(R"({"id":")" + id +
                        R"(","object":"response","status":"completed",)"
                        R"("error":null,"incomplete_details":null,"output":[{"id":"rs_)" +
                        id +
                        R"(_0","type":"reasoning","status":"completed","summary":[],)"
                        R"("content":[{"type":"reasoning_text","text":"hm"}]},{"id":"msg_)" +
                        id +
                        R"(_1","type":"message","status":"completed","role":)"
                        R"("assistant","content":[{"type":"output_text","text":"One:",)"
                        R"("annotations":[],"logprobs":[]}]},{"id":"fc_)" +
                        id + R"(_2","type":"function_call","status":"completed","call_id":)"));
  EXPECT_THAT(answer,
              HasSubstr(R"("name":"add","arguments":"{\"a\":1}"}],"usage":{"input_tokens":)"));
  const std::string cut = send("abc", R"("max_output_tokens":4)");
  EXPECT_THAT(cut, HasSubstr(R"("status":"incomplete","error":null,"incomplete_details":)"
                             R"({"reason":"max_output_tokens"},"output":[{"id":"msg_)"));
  EXPECT_THAT(cut, HasSubstr(R"("type":"message","status":"incomplete")"));
  EXPECT_THAT(cut,
              HasSubstr(R"("usage":{"input_tokens":3,"input_tokens_details":{"cached_tokens":0,)"
                        R"("cache_write_tokens":0},"output_tokens":4,"output_tokens_details":)"
                        R"({"reasoning_tokens":0},"total_tokens":7})"));
}

TEST_F(ResponsesTest, StreamsHaveTheEventsInOrder) {
  const std::string answer = send(kCall, std::string(R"("stream":true,)") + kTool);
  size_t at = 0;
  int number = 0;
  for (const char* type : {"response.created",
                           "response.in_progress",
                           "response.output_item.added",
                           "response.content_part.added",
                           "response.reasoning_text.delta",
                           "response.reasoning_text.delta",
                           "response.reasoning_text.done",
                           "response.content_part.done",
                           "response.output_item.done",
                           "response.output_item.added",
                           "response.content_part.added",
                           "response.output_text.delta",
                           "response.output_text.delta",
                           "response.output_text.delta",
                           "response.output_text.delta",
                           "response.output_text.done",
                           "response.content_part.done",
                           "response.output_item.done",
                           "response.output_item.added",
                           "response.function_call_arguments.delta",
                           "response.function_call_arguments.done",
                           "response.output_item.done",
                           "response.completed"}) {
    const std::string head = std::string("event: ") + type + "\ndata: {\"type\":\"" + type + "\"";
    const size_t found = answer.find("event: ", at);
    ASSERT_NE(found, std::string::npos) << type;
    EXPECT_EQ(answer.substr(found, head.size()), head);
    at = answer.find("\n\n", found);
    const std::string numbered = "\"sequence_number\":" + std::to_string(number++) + "}";
    EXPECT_THAT(answer.substr(found, at - found), HasSubstr(numbered));
  }
  EXPECT_EQ(answer.find("event: ", at), std::string::npos);
  EXPECT_THAT(answer, Not(HasSubstr("[DONE]")));
}

TEST_F(ResponsesTest, AreStoredAndContinued) {
  const std::string id = id_of(send("ab$"));
  const std::string stored = call("GET", "/v1/responses/" + id);
  EXPECT_THAT(stored, HasSubstr(R"("status":"completed")"));
  EXPECT_THAT(stored, HasSubstr(R"("text":"ab")"));
  // The fake says what all messages say: "ab$" and "ab" so far.
  const std::string next = send("c$", R"("previous_response_id":")" + id + "\"");
  EXPECT_THAT(next, HasSubstr(R"("input_tokens":7)"));  // "ab$abc$"
  const std::string unkept = id_of(send("ab$", R"("store":false)"));
  EXPECT_THAT(call("GET", "/v1/responses/" + unkept), HasSubstr("HTTP/1.1 404"));
  EXPECT_THAT(send("c", R"("previous_response_id":")" + unkept + "\""),
              HasSubstr(R"("param":"previous_response_id","code":"previous_response_not_found")"));
  EXPECT_THAT(call("GET", "/v1/responses/" + id + "?stream=true"), HasSubstr("HTTP/1.1 400"));
  EXPECT_THAT(call("POST", "/v1/responses/" + id + "/cancel"), HasSubstr("HTTP/1.1 400"));
  EXPECT_THAT(call("POST", "/v1/responses/" + id), HasSubstr("HTTP/1.1 404"));
  EXPECT_THAT(call("DELETE", "/v1/responses/" + id),
              HasSubstr(R"({"id":")" + id + R"(","object":"response","deleted":true})"));
  EXPECT_THAT(call("DELETE", "/v1/responses/" + id), HasSubstr("HTTP/1.1 404"));
  EXPECT_THAT(call("PUT", "/v1/responses/" + id), HasSubstr("takes GET, DELETE, POST"));
}

TEST_F(ResponsesTest, OneUnderWayCanBeCancelled) {
  Client client(server_->port());
  const std::string body = R"({"input":"abc","stream":true,"max_output_tokens":900})";
  client.send("POST /v1/responses HTTP/1.1\r\nConnection: close\r\nContent-Length: " +
              std::to_string(body.size()) + "\r\n\r\n" + body);
  const std::string id = id_of(client.read_until("response.output_text.delta"));
  EXPECT_THAT(call("GET", "/v1/responses/" + id), HasSubstr(R"("status":"in_progress")"));
  EXPECT_THAT(send("x", R"("previous_response_id":")" + id + "\""), HasSubstr("is being made"));
  EXPECT_THAT(call("POST", "/v1/responses/" + id + "/cancel"),
              HasSubstr(R"("status":"cancelled")"));
  EXPECT_THAT(client.read_until(""), HasSubstr(R"("status":"cancelled")"));
  EXPECT_THAT(call("GET", "/v1/responses/" + id), HasSubstr(R"("status":"cancelled")"));
  EXPECT_TRUE(eventually([&] { return engine_.stats().running == 0; }));
}

TEST_F(ResponsesTest, AnAbandonedOneIsForgotten) {
  std::string id;
  {
    Client client(server_->port());
    const std::string body = R"({"input":"abc","stream":true,"max_output_tokens":900})";
    client.send("POST /v1/responses HTTP/1.1\r\nContent-Length: " + std::to_string(body.size()) +
                "\r\n\r\n" + body);
    id = id_of(client.read_until("response.output_text.delta"));
  }
  EXPECT_TRUE(eventually([&] { return !context_->responses->find(id); }));
}

TEST_F(ResponsesTest, ErrorsNameTheFieldsOfTheRoute) {
  EXPECT_THAT(send("x", R"("max_output_tokens":0)"), HasSubstr(R"("param":"max_output_tokens")"));
  EXPECT_THAT(send("x", R"("reasoning":{"effort":"huge"})"),
              HasSubstr(R"("param":"reasoning.effort")"));
  EXPECT_THAT(send("refuse me"), HasSubstr(R"("param":"input")"));
  EXPECT_THAT(send("x", R"("store":1)"), HasSubstr(R"("param":"store")"));
  EXPECT_THAT(send("x", R"("model":"nobody")"), HasSubstr("model_not_found"));
  EXPECT_THAT(send(std::string(1200, 'x')), HasSubstr("context_length_exceeded"));
}

TEST_F(ResponsesTest, FieldsWithoutEffectAreNamedInAHeaderAndCounted) {
  const std::string members =
      R"("max_output_tokens":2,"user":"u","metadata":{"a":"b"},"service_tier":"auto",)"
      R"("include":["reasoning.encrypted_content"],"reasoning":{"effort":"low","summary":"auto"},)"
      R"("text":{"verbosity":"low"},"tools":[{"type":"web_search"}],"wibble":1)";
  const auto warns = HasSubstr(
      "X-Nibble-Warning: ignored: user, include, tools[].type, text.verbosity, reasoning.summary; "
      "1 unknown field\r\n");
  EXPECT_THAT(send("abc", members), warns);
  EXPECT_THAT(send("abc", members + R"(,"stream":true)"), warns);
  EXPECT_THAT(send("abc", R"("max_output_tokens":2,"include":[],"text":{"verbosity":"medium"},)"
                          R"("stream":true,"stream_options":{"include_obfuscation":false})"),
              Not(HasSubstr("X-Nibble-Warning")));
  const std::string metrics = call("GET", "/metrics");
  EXPECT_THAT(metrics, HasSubstr(R"(field="include"} 2)"));
  EXPECT_THAT(metrics, Not(HasSubstr("wibble")));
  EXPECT_EQ(error_of(R"({"input":"x","user":"u"})").param, "user");
  EXPECT_EQ(error_of(R"({"input":"x","include":["reasoning.encrypted_content"]})").param,
            "include");
}

}  // namespace
}  // namespace nibble
