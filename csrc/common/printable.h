// Makes text from untrusted sources safe for terminals, logs and Python.
#pragma once

#include <string>
#include <string_view>

namespace smddp {

// Returns valid UTF-8 without control characters, except line ends and tabs. Replaces every other byte by a question
// mark, such as half a character at the end of a text that was cut.
std::string printable(std::string_view text);

}  // namespace smddp
