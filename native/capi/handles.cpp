#include "capi/handles.h"

#include <algorithm>
#include <cstring>

namespace fqvit::capi {
namespace {

// Of a fixed size, so that storing an error cannot fail.
thread_local char last_error[1024] = "";

constexpr std::uint32_t MAX_THREADS = 256;

}  // namespace

void require_argument(bool condition, const std::string& problem) {
    if (!condition) throw BadArgument(problem);
}

fqvit_status fail_with(fqvit_status status, const std::string& message) noexcept {
    std::size_t length = std::min(message.size(), sizeof last_error - 2);
    // Never ends inside of a character: bytes 10xxxxxx continue one.
    while (length < message.size() && length > 0 && (message[length] & 0xC0) == 0x80) --length;
    for (std::size_t i = 0; i < length; ++i) {
        // Names in a file may contain control characters; the message stays on one line.
        last_error[i] = static_cast<unsigned char>(message[i]) < 0x20 ? ' ' : message[i];
    }
    if (length > 0 && last_error[length - 1] != '.') last_error[length++] = '.';
    last_error[length] = '\0';
    return status;
}

EngineOptions read_options(const fqvit_options* given, std::int64_t most_run_bytes) {
    fqvit_options options = FQVIT_OPTIONS_INIT;
    if (given != nullptr) {
        require_argument(given->struct_size >= sizeof(std::size_t) && given->struct_size <= 4096,
                         "options: struct_size is " + std::to_string(given->struct_size) +
                             ", expected sizeof(fqvit_options). Initialize with FQVIT_OPTIONS_INIT");
        std::memcpy(&options, given, std::min(given->struct_size, sizeof options));
    }
    require_argument(options.threads <= MAX_THREADS,
                     "threads: " + std::to_string(options.threads) + ", expected 1 to " + std::to_string(MAX_THREADS));
    EngineOptions out;
    out.threads = options.threads == 0 ? 1 : static_cast<int>(options.threads);
    out.most_run_bytes = most_run_bytes;
    if (options.max_run_bytes != 0) {
        constexpr std::uint64_t LARGEST = std::uint64_t{1} << 62;
        out.most_run_bytes = static_cast<std::int64_t>(std::min(options.max_run_bytes, LARGEST));
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

void copy_known(void* to, std::size_t size, const void* from, std::size_t known) {
    require_argument(to != nullptr, "description: null, expected a struct");
    require_argument(size > 0 && size <= 4096, "size: " + std::to_string(size) + ", expected the size of the struct");
    std::memset(to, 0, size);
    std::memcpy(to, from, std::min(size, known));
}

}  // namespace fqvit::capi

using namespace fqvit;

extern "C" {

uint32_t fqvit_abi_version(void) { return FQVIT_ABI_VERSION; }
const char* fqvit_version(void) { return FQVIT_VERSION; }
const char* fqvit_last_error(void) { return capi::last_error; }

const char* fqvit_instruction_set(size_t i) {
    // Kept for ever, because callers keep the pointers.
    static const std::vector<std::string>* const names = new std::vector<std::string>(instruction_sets());
    return i < names->size() ? (*names)[i].c_str() : nullptr;
}

}  // extern "C"
