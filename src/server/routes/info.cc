#include <utility>

#include "server/routes.h"

namespace nibble {
namespace {

/// What a client may want to know of the model.
Json model_members(const AppContext& context) {
  const AppOptions& options = context.options;
  return Json::object({{"model_path", options.model_path},
                       {"tokenizer_path", options.tokenizer_path},
                       {"served_model_name", options.model_names.front()},
                       {"is_generation", true},
                       {"weight_version", "default"},
                       {"max_model_len", context.engine.options().max_model_len},
                       {"vocab_size", context.engine.model_config().vocab_size}});
}

}  // namespace

void route_model_info(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  exchange->respond({.body = model_members(context).dump()});
}

void route_server_info(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const EngineOptions& options = context.engine.options();
  const EngineStats stats = context.engine.stats();
  Json info = model_members(context);
  info.set("version", context.options.version);
  info.set("status", stats.healthy ? "ready" : "failed");
  info.set("max_running_requests", options.max_num_seqs);
  info.set("max_queued_requests", options.max_queued_requests);
  info.set("chunked_prefill_size", options.max_num_batched_tokens);
  info.set("page_size", options.page_size);
  info.set("disable_radix_cache", !options.prefix_caching);
  info.set("internal_states",
           JsonArray{Json::object({{"num_running_reqs", stats.running},
                                   {"num_waiting_reqs", stats.waiting},
                                   {"pages_total", stats.pages_total},
                                   {"pages_used", stats.pages_used},
                                   {"prompt_tokens", stats.prompt_tokens},
                                   {"cached_tokens", stats.cached_tokens},
                                   {"generated_tokens", stats.generated_tokens}})});
  exchange->respond({.body = info.dump()});
}

/// vLLM's number of requests under way, and SGLang's.
void route_load(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const EngineStats stats = context.engine.stats();
  exchange->respond({.body = Json::object({{"server_load", stats.running + stats.waiting},
                                           {"num_reqs", stats.running + stats.waiting},
                                           {"num_waiting_reqs", stats.waiting}})
                                 .dump()});
}

}  // namespace nibble
