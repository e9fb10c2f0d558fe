// Replaces the parts of the C++ library that print to a terminal before they abort: a module has no terminal. Without
// these parts, it imports no system calls and is smaller. An abort becomes a trap, which JavaScript sees as a
// WebAssembly.RuntimeError.
#include <cstdlib>

extern "C" {

[[noreturn]] void __abort_message(const char*, ...) { std::abort(); }

}  // extern "C"

namespace std {

inline namespace __1 {
[[noreturn]] void __libcpp_verbose_abort(const char*, ...) noexcept { abort(); }
[[noreturn]] void __throw_system_error(int, const char*) { abort(); }  // a std::unique_lock that is used wrongly
}  // namespace __1

}  // namespace std
