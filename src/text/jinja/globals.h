#pragma once

#include "base/status.h"
#include "text/jinja/runtime.h"

namespace nibble::jinja {

/// Defines range, dict, namespace, raise_exception and strftime_now in `scope`.
Status define_globals(Scope& scope, Runtime& runtime);

}  // namespace nibble::jinja
