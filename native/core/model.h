// A classifier or feature extractor loaded from a .fqvit file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/engine.h"
#include "ir/header.h"

namespace fqvit {

// Ends the error message of a file whose contents break a rule.
constexpr const char* DAMAGED = "The file is damaged or was not written by fqvit";

// Calls action(). If its error has no remedy, adds to the message that the file is damaged.
template <class Action>
void with_remedy(const Action& action) {
    try {
        action();
    } catch (const BadFile&) {
        throw;
    } catch (const BadProgramWithRemedy&) {
        throw;
    } catch (const BadProgram& error) {
        throw BadProgramWithRemedy(std::string(error.what()) + ". " + DAMAGED);
    }
}

class Model {
public:
    // Reads and verifies everything that the file contains. Throws BadProgram, or BadFile if the source cannot be
    // read. Every message ends with a remedy, without a full stop.
    Model(std::shared_ptr<Source> source, const EngineOptions& options);

    const Header& header() const { return header_; }
    const std::string& json() const { return json_; }  // the header as it is stored
    const std::string& fingerprint() const { return fingerprint_; }
    bool has_classes() const { return has_classes_; }
    const std::string& classes() const { return classes_; }  // names in UTF-8, one per line
    // The exponents of output i, one per channel; empty if it has none.
    const std::vector<std::uint8_t>& alpha(std::size_t i) const { return alphas_[i]; }
    Engine& engine() const { return *engine_; }

private:
    void load(std::shared_ptr<Source> source, const EngineOptions& options);

    Header header_;
    std::string json_, fingerprint_, classes_;
    bool has_classes_ = false;
    std::vector<std::vector<std::uint8_t>> alphas_;
    std::unique_ptr<Engine> engine_;
};

// Checks what the engine does not need: the kinds of the outputs and the sites, against the buffers of the program.
void check_header(const Header& header, const Engine& engine, const Constants& constants);

// Checks that every output of kind logits has one logit per class name.
void check_classes(const Header& header, const Engine& engine, std::int64_t count);

}  // namespace fqvit
