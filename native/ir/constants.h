// The constants of a program: named integer arrays, in a file or in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/value.h"
#include "ir/source.h"

namespace fqvit {

// An array in memory, in the byte order of this machine.
struct Constant {
    DType dtype = DType::u8;
    Shape shape{};
    std::vector<std::uint8_t> bytes{};

    std::int64_t count() const { return static_cast<std::int64_t>(bytes.size()) / size_of(dtype); }
    // T: the C++ type of dtype.
    template <class T>
    const T* as() const {
        return reinterpret_cast<const T*>(bytes.data());
    }
};

class Constants {
public:
    struct Entry {
        DType dtype;
        Shape shape;
        std::uint64_t offset;                   // in the source
        std::shared_ptr<const Constant> owned;  // if not null, replaces the bytes in the source
        std::size_t bytes() const;
    };

    Constants() = default;
    explicit Constants(std::shared_ptr<Source> source) : source_(std::move(source)) {}

    // Adds an array that is stored in the source, little-endian.
    void add(std::string name, DType dtype, Shape shape, std::uint64_t offset);
    // Adds or replaces an array in memory.
    void set(std::string name, Constant constant);
    void remove(const std::string& name) { entries_.erase(name); }

    // Returns a copy that does not need the source: it holds all arrays in memory except `dropped`, of which only the
    // type and shape remain. Reading one of those throws BadFile.
    Constants detached(const std::set<std::string>& dropped) const;

    bool contains(std::string_view name) const { return entries_.contains(name); }
    const Entry* find(std::string_view name) const;  // null if there is none
    // Returns a copy. The name must exist.
    Constant read(std::string_view name) const;
    // Calls piece(data, size) for the bytes of an entry as they are stored, in order.
    template <class Piece>
    void read_pieces(const Entry& entry, const Piece& piece) const;

    std::size_t stored_bytes() const;
    // Sorted by name.
    const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }
    const std::shared_ptr<Source>& source() const { return source_; }

private:
    std::shared_ptr<Source> source_;
    std::map<std::string, Entry, std::less<>> entries_;
};

template <class Piece>
void Constants::read_pieces(const Entry& entry, const Piece& piece) const {
    constexpr std::size_t PIECE = std::size_t{1} << 18;
    const std::size_t size = entry.bytes();
    std::vector<std::uint8_t> buffer(size < PIECE ? size : PIECE);
    for (std::size_t at = 0; at < size; at += PIECE) {
        const std::size_t count = size - at < PIECE ? size - at : PIECE;
        source_->read(entry.offset + at, count, buffer.data());
        piece(buffer.data(), count);
    }
}

}  // namespace fqvit
