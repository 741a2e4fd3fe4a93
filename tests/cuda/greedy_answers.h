#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/testing/gpu_test.h"
#include "engine/engine_core.h"
#include "model/model.h"

namespace nibble {

struct AnswersShape {
  int32_t max_tokens = 0;
  int64_t max_model_len = 0;  // that the model must have
};

/// Greedy answers to prompts that are there at once.
inline std::vector<std::vector<int32_t>> greedy_answers(
    const std::string& folder,
    Backend& backend,
    const std::vector<std::vector<int32_t>>& prompts,
    const AnswersShape& shape) {
  EngineOptions options;
  options.max_num_seqs = 8;
  auto model = load_model(folder, backend, {.max_batch_tokens = 512, .max_logit_rows = 8}).value();
  options.max_num_batched_tokens = 512;
  options = EngineCore::resolve(options, model->config(), &backend).value();
  EXPECT_EQ(options.max_model_len, shape.max_model_len);
  auto core = EngineCore::create(std::move(model), options).value();
  std::vector<std::vector<int32_t>> out(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request request;
    request.prompt = prompts[i];
    request.max_tokens = cuda::testing::brief_tests() ? 8 : shape.max_tokens;
    request.ignore_eos = true;
    request.sampling.temperature = 0;
    request.on_event = [&out, i](const TokenEvent& event) {
      EXPECT_TRUE(event.failure.ok()) << event.failure.message();
      out[i].push_back(event.token);
    };
    core->add(std::move(request));
  }
  while (core->step()) {
  }
  core->check_integrity();
  return out;
}

}  // namespace nibble
