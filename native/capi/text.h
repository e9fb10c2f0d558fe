// Text that leaves the library: valid UTF-8, whatever a file or a path contains.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fqvit::capi {

// Replaces each part that is not UTF-8 by U+FFFD, as Python's errors="replace" does.
std::string valid_utf8(std::string_view text);

// Copies as many whole characters as fit into `capacity` bytes together with the final zero byte. Control characters
// and line separators become spaces. Returns the length without the zero byte. Does not allocate, so that it also works
// when memory is exhausted.
std::size_t copy_line(std::string_view text, char* to, std::size_t capacity) noexcept;

}  // namespace fqvit::capi
