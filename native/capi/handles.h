// What all functions of the C API share: handles, error messages and the translation of exceptions.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <set>
#include <string>

#include "core/engine.h"
#include "core/mutex.h"
#include "fqvit.h"
#include "ir/source.h"

namespace fqvit::capi {

// An invalid argument in a call of the C API.
class BadArgument : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

void require_argument(bool condition, const std::string& problem);

// Remembers the error of this thread; returns the status. Allocates nothing, so that it works when memory is exhausted.
fqvit_status fail_with(fqvit_status status, const char* message) noexcept;

// Calls the function and translates its exceptions: none reaches the caller of the C API.
template <class Call>
fqvit_status guarded(const Call& call) noexcept {
    try {
        call();
        return FQVIT_OK;
    } catch (const BadArgument& error) {
        return fail_with(FQVIT_ERROR_ARGUMENT, error.what());
    } catch (const BadFile& error) {
        return fail_with(FQVIT_ERROR_FILE, error.what());
    } catch (const BadProgram& error) {
        return fail_with(FQVIT_ERROR_PROGRAM, error.what());
    } catch (const std::bad_alloc&) {
        return fail_with(FQVIT_ERROR_MEMORY, "not enough memory");
    } catch (const std::exception& error) {
        return fail_with(FQVIT_ERROR_INTERNAL, error.what());
    }
}

// The live handles of one type. Detects the use of a freed handle, unless a new one has the same address.
template <class Handle>
class Handles {
public:
    void add(const Handle* handle) {
        const std::lock_guard lock(mutex_);
        live_.insert(handle);
    }
    // Returns whether the handle existed.
    bool remove(const Handle* handle) {
        const std::lock_guard lock(mutex_);
        return live_.erase(handle) == 1;
    }
    void require(const Handle* handle) {
        const std::lock_guard lock(mutex_);
        require_argument(live_.contains(handle), handle == nullptr ? "handle: null, expected one that was loaded"
                                                                   : "handle: unknown, it was freed or never loaded");
    }

private:
    Mutex mutex_;
    std::set<const Handle*> live_;
};

// Checks the options and converts them. max_run_bytes: the default limit.
EngineOptions read_options(const fqvit_options* options, std::int64_t max_run_bytes);

// Returns the path, or the end of a long one.
std::string shown_path(const char* path);

// Calls load() and puts "path: " before its errors.
template <class Load>
void with_path(const char* path, const Load& load) {
    const auto named = [&](const std::exception& error) { return shown_path(path) + ": " + error.what(); };
    try {
        load();
    } catch (const BadFile& error) {
        throw BadFile(named(error));
    } catch (const BadProgram& error) {
        throw BadProgram(named(error));
    }
}

// Returns whether some version of the struct can have this size: versions only append members, and sizeof is a multiple
// of the alignment.
template <class Struct>
bool is_struct_size(std::size_t size) {
    return size > 0 && size <= 4096 && size % alignof(Struct) == 0;
}

// Copies the members that the caller knows; those that only a newer caller knows become 0.
template <class Struct>
void copy_known(const Struct& from, Struct* to, std::size_t size) {
    require_argument(to != nullptr, "description: null, expected a struct");
    require_argument(is_struct_size<Struct>(size), "size: " + std::to_string(size) + ", expected the struct's size");
    std::memset(to, 0, size);
    std::memcpy(to, &from, std::min(size, sizeof from));
}

}  // namespace fqvit::capi
