#pragma once

#include <string>

#include "base/status.h"
#include "server/text_frontend.h"

namespace nibble {

/// The prompt of a chat whose last message is left open: it ends with that message's text, without
/// what the template puts behind it. Blanks at its end are dropped where the template does so.
/// Errors: those of render_chat(); kInvalidArgument where the template does not show the text as it
/// is.
Result<std::string> render_continued(const TextFrontend& text, const ChatInput& input);

}  // namespace nibble
