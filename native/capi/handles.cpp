#include "capi/handles.h"

#include <algorithm>
#include <cstring>

#include "capi/text.h"

namespace fqvit::capi {
namespace {

// The buffer has a fixed size, so that storing an error cannot fail.
thread_local char last_error[1024] = "";

constexpr std::uint32_t MAX_THREADS = 256;

}  // namespace

void require_argument(bool condition, const std::string& problem) {
    if (!condition) throw BadArgument(problem);
}

fqvit_status fail_with(fqvit_status status, const char* message) noexcept {
    const std::size_t length = copy_line(message, last_error, sizeof last_error - 1);
    if (length > 0 && last_error[length - 1] != '.') std::strcpy(last_error + length, ".");
    return status;
}

std::string shown_path(const char* path) {
    // Each invalid byte may become U+FFFD, 3 bytes. The message after the path must still fit into last_error.
    constexpr std::size_t LONGEST = 300;
    const std::string text(path);
    return text.size() <= LONGEST ? text : "..." + text.substr(text.size() - LONGEST);
}

EngineOptions read_options(const fqvit_options* given, std::int64_t max_run_bytes) {
    fqvit_options options = FQVIT_OPTIONS_INIT;
    if (given != nullptr) {
        const std::size_t size = given->struct_size;
        require_argument(is_struct_size<fqvit_options>(size),
                         "options: struct_size is " + std::to_string(size) +
                             ", expected sizeof(fqvit_options). Initialize with FQVIT_OPTIONS_INIT");
        std::memcpy(&options, given, std::min(size, sizeof options));
        // Members that a newer caller has set would otherwise be silently ignored.
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(given);
        require_argument(
            std::all_of(bytes + std::min(size, sizeof options), bytes + size, [](auto b) { return b == 0; }),
            "options: a member is set that this version of the library does not have. Set it to 0");
    }
    require_argument(options.threads <= MAX_THREADS,
                     "threads: " + std::to_string(options.threads) + ", expected 1 to " + std::to_string(MAX_THREADS));
    EngineOptions out;
    out.threads = options.threads == 0 ? 1 : static_cast<int>(options.threads);
    out.max_run_bytes = max_run_bytes;
    if (options.max_run_bytes != 0) {
        constexpr std::uint64_t LARGEST = std::uint64_t{1} << 62;
        out.max_run_bytes = static_cast<std::int64_t>(std::min(options.max_run_bytes, LARGEST));
    }
    if (options.instruction_set != nullptr && *options.instruction_set != '\0') {
        out.instruction_set = options.instruction_set;
        const std::vector<std::string> known = instruction_sets();
        std::string list;
        for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
        require_argument(std::find(known.begin(), known.end(), out.instruction_set) != known.end(),
                         "instruction set " + out.instruction_set +
                             ": not in this build or not on this CPU, expected one of " + list);
    }
    return out;
}

}  // namespace fqvit::capi

using namespace fqvit;

extern "C" {

uint32_t fqvit_abi_version(void) { return FQVIT_ABI_VERSION; }
const char* fqvit_version(void) { return FQVIT_VERSION; }
const char* fqvit_last_error(void) { return capi::last_error; }

const char* fqvit_instruction_set(size_t i) {
    const char* name = nullptr;
    static_cast<void>(capi::guarded([&] {
        // Never deleted, because callers keep the pointers.
        static const std::vector<std::string>* const names = new std::vector<std::string>(instruction_sets());
        if (i < names->size()) name = (*names)[i].c_str();
    }));
    return name;
}

}  // extern "C"
