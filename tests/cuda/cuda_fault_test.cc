// What the engine does when the GPU faults in mid-run. A fault ends all CUDA work of its process,
// so each test is one.

#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_info.h"
#include "backend/cuda/testing/faulty_gemm.h"
#include "engine/engine.h"
#include "model/model.h"

namespace nibble {
namespace {

using cuda::testing::Fault;
using cuda::testing::faulty_gemms;

constexpr const char* kModel = "models/storyteller";
constexpr int kRequests = 3;

struct Outcome {
  int tokens = 0;
  std::string error;
};

/// A request that is answered with all its events' sum.
Request make_request(std::promise<Outcome>& promise) {
  Request request;
  request.prompt = {5, 6, 7, 8};
  request.max_tokens = 500;
  request.ignore_eos = true;
  request.on_event = [&promise, outcome = std::make_shared<Outcome>()](const TokenEvent& event) {
    outcome->tokens += event.token >= 0 ? 1 : 0;
    if (event.finish != FinishReason::kNone) {
      outcome->error = event.failure.message();
      promise.set_value(*outcome);
    }
  };
  return request;
}

void require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "not so: %s\n", what);
    std::_Exit(1);
  }
}

/// Serves requests until product `runs`, then looks at what is left. Ends the process.
[[noreturn]] void fault_in_mid_run(uint32_t runs) {
  auto backend = make_cuda_backend({}, faulty_gemms(Fault::kTrap, runs)).value();
  {
    auto model = load_model(kModel, *backend, {.max_batch_tokens = 512, .max_logit_rows = 8});
    require(model.ok(), "the model loads");
    EngineOptions options;
    options.max_num_seqs = 8;
    options.kv_bytes = int64_t{64} << 20;
    const ModelConfig config = (*model)->config();
    options = Engine::resolve_options(options, config, backend.get()).value();
    const auto engine = Engine::start(std::move(model).value(), options).value();
    std::vector<std::promise<Outcome>> promises(kRequests);
    for (auto& promise : promises) {
      require(engine->submit(make_request(promise)).ok(), "the engine takes requests");
    }
    int tokens = 0;
    for (auto& promise : promises) {
      auto future = promise.get_future();
      require(future.wait_for(std::chrono::seconds(60)) == std::future_status::ready, "no hang");
      const Outcome outcome = future.get();
      require(!outcome.error.empty(), "every request gets an error");
      std::fprintf(stderr, "%d tokens, then: %s\n", outcome.tokens, outcome.error.c_str());
      tokens += outcome.tokens;
    }
    require(tokens > 0, "the fault came in mid-run");
    // The engine thread publishes its state right after the last event.
    for (int i = 0; i < 1000 && engine->stats().healthy; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const EngineStats stats = engine->stats();
    require(!stats.healthy && !stats.failure.empty(), "the engine says why it is unhealthy");
    std::promise<Outcome> promise;
    require(!engine->submit(make_request(promise)).ok(), "no more requests are taken");
    engine->drain(1);
  }
  backend.reset();
  std::fprintf(stderr, "ended in order\n");
  std::_Exit(0);
}

TEST(CudaFaultDeathTest, RequestsGetErrorsAndTheEngineIsUnhealthy) {
  const auto device = cuda::query_device(0);
  if (!device.ok()) {
    GTEST_SKIP() << device.status().message();
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // no CUDA context survives a fork
  EXPECT_EXIT(fault_in_mid_run(2000), testing::ExitedWithCode(0),
              "then: .*cudaErrorLaunchFailure(.|\n)*ended in order");
}

TEST(CudaFaultDeathTest, ModelsWithDamagedWeightsAreNotLoaded) {
  const auto device = cuda::query_device(0);
  if (!device.ok()) {
    GTEST_SKIP() << device.status().message();
  }
  const auto backend = make_cuda_backend({}, faulty_gemms(Fault::kDamagedWeights)).value();
  const auto model = load_model(kModel, *backend, {});
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().code(), StatusCode::kUnavailable);
  const std::string& message = model.status().message();
  std::printf("%s\n", message.c_str());
  for (const char* word : {"self-test", "gemm_bf16", "model.embed_tokens.weight", "--device cpu"}) {
    EXPECT_NE(message.find(word), std::string::npos) << word << " in " << message;
  }
}

}  // namespace
}  // namespace nibble
