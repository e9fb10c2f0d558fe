// The JSON of a program: its ops and everything that describes it. src/fqvit/ir/program.py defines the fields.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "image/preprocess.h"
#include "ir/fields.h"
#include "ir/op_json.h"
#include "ir/program.h"

namespace fqvit {

enum class OutputKind : std::uint8_t { logits, tokens, pooled, map, scores, deltas, embedding, signs };
enum class MoveKind : std::uint8_t { patches, grid, windows, tokens, merge, neighbours, enlarged, second };

template <>
struct Names<OutputKind> {
    static constexpr const char* names[] = {"logits", "tokens", "pooled",    "map",
                                            "scores", "deltas", "embedding", "signs"};
};
template <>
struct Names<MoveKind> {
    static constexpr const char* names[] = {"patches", "grid",       "windows",  "tokens",
                                            "merge",   "neighbours", "enlarged", "second"};
};
template <>
struct Names<Interpolation> {
    static constexpr const char* names[] = {"bilinear", "bicubic"};
};

// A scale: positive and below 1e30.
struct Scale {
    double value = 1;
};

// A buffer that a run returns: value = (code - zero) * scale * 2^alpha[c].
struct Output {
    std::string buffer;
    OutputKind kind = OutputKind::logits;
    Scale scale{};
    std::int64_t zero = 0;
    OptionalName alpha{};
    std::string name{};  // the name of the output; empty if it is named after its kind

    const char* kind_name() const { return Names<OutputKind>::names[static_cast<std::size_t>(kind)]; }
    std::string label() const { return name.empty() ? kind_name() : name; }
};

// The input of a program that reads codes instead of pixels.
struct CodeInput {
    std::array<std::int64_t, 3> shape{};
    Scale scale{};
    std::int64_t zero = 0, bits = 8;
};

// How an op depends on the image size.
struct Move {
    MoveKind kind = MoveKind::patches;
    std::int64_t window = 0, shift = 0;
    std::string of{};
};

// The zero points of a site: numbers, or the name of a constant.
struct SiteZero {
    std::vector<std::int64_t> values{};
    OptionalName constant{};
};

// How to decode the codes of a buffer.
struct Site {
    std::string role;
    std::int64_t bits = 8;
    std::vector<Scale> scale{};
    SiteZero zero{};
    OptionalName alpha{};
    bool log2 = false, zero_code = false;
    OptionalName steps{};
    std::vector<std::int64_t> levels{};
};

// Any JSON object, kept as text.
struct RawObject {
    std::string text = "{}";
};

struct Header {
    std::int64_t version = 0;
    std::string model{};
    Preprocess preprocess{};
    std::vector<OpFields> ops{};
    Output output{};
    std::map<std::string, Site, std::less<>> sites{};
    RawObject recipe{};
    std::string source{};
    std::int64_t images = 0;
    std::vector<Output> others{};
    std::optional<CodeInput> input{};
    std::map<std::string, Move, std::less<>> moves{};

    Shape input_shape() const;
    std::vector<Output> outputs() const;  // output, then others
};

template <>
struct Description<Preprocess> {
    static constexpr auto fields() {
        using F = Preprocess;
        constexpr Bounds PIXELS{.lo = 1, .hi = F::MAX_OUTPUT_SIDE};
        return std::tuple{required<&F::height>("height", PIXELS),
                          required<&F::width>("width", PIXELS),
                          required<&F::channels>("channels"),
                          required<&F::resize>("resize", PIXELS),
                          required<&F::interpolation>("interpolation"),
                          required<&F::mean>("mean"),
                          required<&F::std>("std"),
                          optional<&F::squash>("squash")};
    }
    static void check(const Preprocess& preprocess, const Where& where);
};

template <>
struct Description<Output> {
    static constexpr auto fields() {
        using F = Output;
        return std::tuple{required<&F::buffer>("buffer"), required<&F::kind>("kind"),
                          required<&F::scale>("scale"),   optional<&F::zero>("zero", {.lo = 0, .hi = 65535}),
                          optional<&F::alpha>("alpha"),   optional<&F::name>("name")};
    }
    static void check(const Output& output, const Where& where);
};

template <>
struct Description<CodeInput> {
    static constexpr auto fields() {
        using F = CodeInput;
        return std::tuple{required<&F::shape>("shape"), required<&F::scale>("scale"),
                          required<&F::zero>("zero", {.lo = 0, .hi = 255}),
                          optional<&F::bits>("bits", {.lo = 1, .hi = 8})};
    }
};

template <>
struct Description<Move> {
    static constexpr auto fields() {
        using F = Move;
        return std::tuple{required<&F::kind>("kind"), optional<&F::window>("window", {.lo = 0, .hi = 256}),
                          optional<&F::shift>("shift", {.lo = 0, .hi = 256}), optional<&F::of>("of")};
    }
};

template <>
struct Description<Site> {
    static constexpr bool IS_ARRAY = true;
    static constexpr auto fields() {
        using F = Site;
        constexpr Bounds CODE{.lo = 0, .hi = 65535};
        return std::tuple{required<&F::role>("role"),           required<&F::bits>("bits", {.lo = 1, .hi = 16}),
                          optional<&F::scale>("scale"),         optional<&F::zero>("zero", CODE),
                          optional<&F::alpha>("alpha"),         optional<&F::log2>("log2"),
                          optional<&F::zero_code>("zero_code"), optional<&F::steps>("steps"),
                          optional<&F::levels>("levels", CODE)};
    }
};

template <>
struct Description<Header> {
    static constexpr auto fields() {
        using F = Header;
        return std::tuple{required<&F::version>("version"),       required<&F::model>("model"),
                          required<&F::preprocess>("preprocess"), required<&F::ops>("ops", {.longest = MAX_OPS}),
                          required<&F::output>("output"),         required<&F::sites>("sites"),
                          required<&F::recipe>("recipe"),         required<&F::source>("source"),
                          required<&F::images>("images"),         optional<&F::others>("others"),
                          optional<&F::input>("input"),           optional<&F::moves>("moves")};
    }
};

void read_field(Json json, const Where& where, const Bounds& bounds, Scale& out);
void read_field(Json json, const Where& where, const Bounds& bounds, SiteZero& out);
void read_field(Json json, const Where& where, const Bounds& bounds, RawObject& out);

// Checks the version of a file's JSON, before anything else in it is read.
void check_version(Json json);
// Checks that the ops of a program have no field that this format version lacks.
void check_fields(std::int64_t version, const Header& header);

// Reads the JSON of a program.
Header read_header(const std::string& json);

}  // namespace fqvit
