// Text that others may have written, made fit for terminals, logs and Python.
#pragma once

#include <string>
#include <string_view>

namespace smddp {

// Valid UTF-8 without control characters but for line ends and tabs: a question mark stands for each byte
// that is something else, such as half a character where a text was cut.
std::string printable(std::string_view text);

}  // namespace smddp
