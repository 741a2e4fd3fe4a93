// Serves the routes over an engine that says what it is told (src/server/testing/fake_serving.h),
// so that a client can be shown any answer. Thoughts are marked by <think>, calls are Hermes's.
// Prints the port; ends when its standard input does.
#include <cstdio>
#include <string>

#include <fmt/core.h>

#include "server/gate.h"
#include "server/testing/fake_serving.h"

int main() {
  using namespace nibble;
  FakeEngine engine;
  const TextFrontend text = fake_text();
  AppOptions options{
      .model_names = {"fake"}, .api_keys = {{.key = "e2e-key", .name = "e2e"}}, .version = "1"};
  options.form = {ReasoningForm::kThink, ToolForm::kHermes};
  AppContext context(std::move(options), engine, text);
  AppGate gate("1");
  HttpOptions http;
  http.port = 0;
  auto server = HttpServer::start(http, gate.callbacks());
  if (!server.ok()) {
    fmt::print(stderr, "{}\n", server.status().message());
    return 1;
  }
  gate.open(context);
  fmt::print("{}\n", (*server)->port());
  (void)std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  return 0;
}
