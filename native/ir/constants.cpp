#include "ir/constants.h"

#include <algorithm>
#include <bit>

namespace fqvit {

std::size_t Constants::Entry::bytes() const {
    std::size_t count = static_cast<std::size_t>(size_of(dtype));
    for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
    return count;
}

void Constants::add(std::string name, DType dtype, Shape shape, std::uint64_t offset) {
    entries_.insert_or_assign(std::move(name), Entry{dtype, std::move(shape), offset, nullptr});
}

void Constants::set(std::string name, Constant constant) {
    Entry entry{constant.dtype, constant.shape, 0, nullptr};
    entry.owned = std::make_shared<const Constant>(std::move(constant));
    entries_.insert_or_assign(std::move(name), std::move(entry));
}

const Constants::Entry* Constants::find(std::string_view name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? nullptr : &found->second;
}

Constant Constants::read(std::string_view name) const {
    const Entry& entry = *find(name);
    if (entry.owned != nullptr) return *entry.owned;
    if (source_ == nullptr) throw BadFile("constant '" + std::string(name) + "' was not kept in memory");
    Constant out{entry.dtype, entry.shape, std::vector<std::uint8_t>(entry.bytes())};
    source_->read(entry.offset, out.bytes.size(), out.bytes.data());
    const auto size = static_cast<std::ptrdiff_t>(size_of(entry.dtype));
    if (std::endian::native == std::endian::big && size > 1) {
        for (auto at = out.bytes.begin(); at != out.bytes.end(); at += size) std::reverse(at, at + size);
    }
    return out;
}

Constants Constants::detached(const std::set<std::string>& dropped) const {
    Constants out;
    for (const auto& [name, entry] : entries_) {
        if (dropped.contains(name)) {
            out.add(name, entry.dtype, entry.shape, 0);
        } else {
            out.set(name, read(name));
        }
    }
    return out;
}

std::size_t Constants::stored_bytes() const {
    std::size_t total = 0;
    for (const auto& [name, entry] : entries_) total += entry.bytes();
    return total;
}

}  // namespace fqvit
