// Reads from files, through the C library, and from memory.
#if !defined(_WIN32) && !defined(_FILE_OFFSET_BITS)
#define _FILE_OFFSET_BITS 64  // files over 2 GB on 32-bit systems
#endif
#include "ir/source.h"

#include <cstring>
#if !defined(__wasm__)
#include <filesystem>
#endif

namespace fqvit {
namespace {

#if !defined(__wasm__)
class FileSource final : public Source {
public:
    explicit FileSource(const std::string& path) {
        const std::filesystem::path native(reinterpret_cast<const char8_t*>(path.c_str()));
        std::error_code error;
        if (!std::filesystem::exists(native, error)) {
            const std::string name = path.substr(path.find_last_of('/') + 1);
            const bool named_like_a_program = native.extension() == ".fqvit";
            throw BadFile("no such file. Check the path" +
                          (named_like_a_program ? ", or make one with `fqvit quantize -o " + name + "`" : ""));
        }
        // Opening a FIFO would wait for its writer.
        if (!std::filesystem::is_regular_file(native, error)) throw BadFile("not a regular file. Check the path");
#if defined(_WIN32)
        file_.reset(_wfopen(native.c_str(), L"rb"));
#else
        file_.reset(std::fopen(native.c_str(), "rb"));
#endif
        if (file_ == nullptr) {
            throw BadFile(std::string("cannot be read (") + std::strerror(errno) +
                          "). Check the disk and the file's permissions");
        }
        std::setvbuf(file_.get(), nullptr, _IONBF, 0);
        if (!seek(0, SEEK_END)) fail_read();
        const std::int64_t end = tell();
        if (end < 0) fail_read();
        size_ = static_cast<std::uint64_t>(end);
    }

    std::uint64_t size() const override { return size_; }

    void read(std::uint64_t offset, std::size_t size, void* to) override {
        if (size == 0) return;
        if (!seek(static_cast<std::int64_t>(offset), SEEK_SET)) fail_read();
        if (std::fread(to, 1, size, file_.get()) != size) fail_read();
    }

private:
    struct Close {
        void operator()(std::FILE* file) const { std::fclose(file); }
    };

    [[noreturn]] static void fail_read() {
        throw BadFile("cannot be read, or became shorter while it was read. Check the disk, or try again");
    }

    bool seek(std::int64_t offset, int origin) const {
#if defined(_WIN32)
        return _fseeki64(file_.get(), offset, origin) == 0;
#else
        return fseeko(file_.get(), static_cast<off_t>(offset), origin) == 0;
#endif
    }
    std::int64_t tell() const {
#if defined(_WIN32)
        return _ftelli64(file_.get());
#else
        return static_cast<std::int64_t>(ftello(file_.get()));
#endif
    }

    std::unique_ptr<std::FILE, Close> file_;
    std::uint64_t size_ = 0;
};
#endif

class MemorySource final : public Source {
public:
    MemorySource(const void* data, std::size_t size) : data_(static_cast<const std::uint8_t*>(data)), size_(size) {}
    std::uint64_t size() const override { return size_; }
    void read(std::uint64_t offset, std::size_t size, void* to) override {
        if (offset > size_ || size > size_ - offset) throw BadFile("truncated. Pass a complete .fqvit file");
        if (size > 0) std::memcpy(to, data_ + offset, size);
    }

private:
    const std::uint8_t* data_;
    std::size_t size_;
};

}  // namespace

std::shared_ptr<Source> open_file([[maybe_unused]] const std::string& path) {
#if defined(__wasm__)
    throw BadFile("cannot be opened: a WebAssembly module has no files. Load the model from memory");
#else
    return std::make_shared<FileSource>(path);
#endif
}
std::shared_ptr<Source> borrow_memory(const void* data, std::size_t size) {
    return std::make_shared<MemorySource>(data, size);
}

}  // namespace fqvit
