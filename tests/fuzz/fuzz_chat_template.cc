// Renders the input as a chat template over a small conversation: no crash, no leak, no hang.

#include <cstddef>
#include <cstdint>
#include <string>

#include "text/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string source(reinterpret_cast<const char*>(data), size);
  const nibble::Result<nibble::ChatTemplate> chat = nibble::ChatTemplate::parse(source, "fuzz");
  if (!chat.ok()) {
    return 0;
  }
  nibble::ChatInputs inputs;
  inputs.messages = nibble::Json::parse(R"([{"role": "user", "content": "a é\n"},
      {"role": "assistant", "content": null, "tool_calls": [{"name": "f", "n": 1.5}]}])")
                        .value();
  inputs.bos_token = "<s>";
  inputs.eos_token = "</s>";
  static_cast<void>(chat->render(inputs));
  return 0;
}
