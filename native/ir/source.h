// Where the bytes of a .fqvit file come from: a file, read piece by piece, or memory.
//
// Files are read, not mapped: a mapped file that shrinks would end the process with SIGBUS, its pages would count as
// memory of the process, and its bytes could change between a check and their use. Each read copies, so the checks of
// an op see the bytes that the op uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "core/value.h"

namespace fqvit {

// The file cannot be opened or read, as opposed to having wrong contents.
class BadFile : public BadProgram {
public:
    using BadProgram::BadProgram;
};

class Source {
public:
    virtual ~Source() = default;
    virtual std::uint64_t size() const = 0;
    // Copies size bytes that start at offset. Throws BadFile if they do not exist (any more).
    virtual void read(std::uint64_t offset, std::size_t size, void* to) = 0;
};

// Opens a regular file. The file stays open, so replacing it on disk has no effect. path: UTF-8.
std::shared_ptr<Source> open_file(const std::string& path);
// Borrows memory, which must outlive the source.
std::shared_ptr<Source> borrow_memory(const void* data, std::size_t size);

}  // namespace fqvit
