// The container of a .fqvit file: safetensors, with the JSON of the program in its metadata.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "ir/constants.h"

namespace fqvit {

// The metadata keys of the two kinds of files.
constexpr const char* PROGRAM_KEY = "fqvit";
constexpr const char* DETECTOR_KEY = "fqvit_detector";

struct Container {
    std::map<std::string, std::string, std::less<>> metadata;
    Constants constants;
};

// Reads and checks the header: lengths, types, and that the constants fill the rest of the file without gaps.
Container read_container(std::shared_ptr<Source> source);

// Returns the SHA-256 of the JSON and all constants, in hexadecimal: the fingerprint that a valid file stores.
std::string fingerprint_of(const Container& container, const std::string& json);

// Returns the JSON that the metadata hold under this key, after checking that the fingerprint matches the contents.
const std::string& checked_json(const Container& container, const char* key);

}  // namespace fqvit
