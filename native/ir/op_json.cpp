#include "ir/op_json.h"

namespace fqvit {

template <>
struct Names<LinearOut> {
    static constexpr const char* names[] = {"codes", "acc", "i32"};
};

// Zero points and multipliers are unions: the JSON type selects the alternative.
void read_field(Json json, const Where& where, const Bounds& bounds, Zero& out) {
    out = Zero{};
    if (json.is(Json::text)) {
        read_field(json, where, bounds, out.constant);
    } else if (json.is(Json::array)) {
        read_field(json, where, bounds, out.values);
    } else {
        read_field(json, where, bounds, out.values.front());
    }
}

void read_field(Json json, const Where& where, const Bounds& bounds, Multiplier& out) {
    out = Multiplier{};
    if (json.is(Json::text)) {
        read_field(json, where, bounds, out.constant);
    } else {
        read_field(json, where, bounds, out.value);
    }
}

template <>
struct Description<LookupFields> {
    static constexpr auto fields() {
        using F = LookupFields;
        return std::tuple{required<&F::y>("y"), required<&F::x>("x"), optional<&F::alpha>("alpha"),
                          optional<&F::y_zero>("y_zero"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<LinearFields> {
    static constexpr auto fields() {
        using F = LinearFields;
        return std::tuple{required<&F::y>("y"),
                          required<&F::x>("x"),
                          optional<&F::out>("out"),
                          optional<&F::y_zero>("y_zero"),
                          optional<&F::bits>("bits"),
                          optional<&F::group>("group"),
                          optional<&F::weights_of>("weights_of"),
                          optional<&F::width>("width"),
                          optional<&F::codebooks>("codebooks")};
    }
};

template <>
struct Description<LayerNormFields> {
    static constexpr auto fields() {
        using F = LayerNormFields;
        return std::tuple{required<&F::y>("y"),
                          required<&F::x>("x"),
                          required<&F::epsilon>("epsilon"),
                          required<&F::shift>("shift"),
                          required<&F::b_shift>("b_shift"),
                          optional<&F::zero>("zero"),
                          optional<&F::alpha>("alpha"),
                          optional<&F::bits>("bits"),
                          optional<&F::center>("center"),
                          optional<&F::fraction>("fraction")};
    }
};

template <>
struct Description<TermFields> {
    static constexpr auto fields() {
        using F = TermFields;
        return std::tuple{required<&F::x>("x"), required<&F::mult>("mult"), optional<&F::zero>("zero"),
                          optional<&F::alpha>("alpha")};
    }
};

template <>
struct Description<AddFields> {
    static constexpr auto fields() {
        using F = AddFields;
        return std::tuple{
            required<&F::y>("y"),           required<&F::terms>("terms"),     required<&F::shift>("shift"),
            optional<&F::y_zero>("y_zero"), optional<&F::y_alpha>("y_alpha"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<MeanFields> {
    static constexpr auto fields() {
        using F = MeanFields;
        return std::tuple{required<&F::y>("y"),         required<&F::x>("x"),           required<&F::mult>("mult"),
                          required<&F::shift>("shift"), optional<&F::skip>("skip"),     optional<&F::zero>("zero"),
                          optional<&F::alpha>("alpha"), optional<&F::y_zero>("y_zero"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<TakeFields> {
    static constexpr auto fields() {
        using F = TakeFields;
        return std::tuple{required<&F::y>("y"), required<&F::x>("x"), required<&F::index>("index"),
                          optional<&F::fill>("fill")};
    }
};

template <>
struct Description<PermuteFields> {
    static constexpr auto fields() {
        using F = PermuteFields;
        return std::tuple{required<&F::y>("y"),       required<&F::x>("x"),         required<&F::view>("view"),
                          required<&F::perm>("perm"), optional<&F::shape>("shape"), optional<&F::select>("select")};
    }
};

template <>
struct Description<ConcatFields> {
    static constexpr auto fields() {
        using F = ConcatFields;
        return std::tuple{required<&F::y>("y"), required<&F::xs>("xs")};
    }
};

template <>
struct Description<MatMulFields> {
    static constexpr auto fields() {
        using F = MatMulFields;
        return std::tuple{
            required<&F::y>("y"),           required<&F::a>("a"),           required<&F::b>("b"),
            required<&F::mult>("mult"),     required<&F::shift>("shift"),   optional<&F::a_zero>("a_zero"),
            optional<&F::b_zero>("b_zero"), optional<&F::b_rows>("b_rows"), optional<&F::index>("index"),
            optional<&F::y_zero>("y_zero"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<LogSoftmaxFields> {
    static constexpr auto fields() {
        using F = LogSoftmaxFields;
        return std::tuple{required<&F::y>("y"), required<&F::x>("x"), optional<&F::bits>("bits"),
                          optional<&F::region>("region")};
    }
};

template <>
struct Description<SoftmaxFields> {
    static constexpr auto fields() {
        using F = SoftmaxFields;
        return std::tuple{required<&F::y>("y"),         required<&F::x>("x"),       required<&F::mult>("mult"),
                          required<&F::shift>("shift"), optional<&F::bits>("bits"), optional<&F::region>("region")};
    }
};

template <>
struct Description<RowCodesFields> {
    static constexpr auto fields() {
        using F = RowCodesFields;
        return std::tuple{required<&F::y>("y"), required<&F::x>("x"), optional<&F::region>("region")};
    }
};

template <>
struct Description<ShiftMatMulFields> {
    static constexpr auto fields() {
        using F = ShiftMatMulFields;
        return std::tuple{required<&F::y>("y"),           required<&F::a>("a"),
                          required<&F::v>("v"),           required<&F::mult>("mult"),
                          required<&F::shift>("shift"),   optional<&F::v_zero>("v_zero"),
                          optional<&F::a_bits>("a_bits"), optional<&F::zero_code>("zero_code"),
                          optional<&F::y_zero>("y_zero"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<AttendFields> {
    static constexpr auto fields() {
        using F = AttendFields;
        return std::tuple{
            required<&F::y>("y"),           required<&F::a>("a"),           required<&F::v>("v"),
            required<&F::mult>("mult"),     required<&F::shift>("shift"),   optional<&F::levels>("levels"),
            optional<&F::v_zero>("v_zero"), optional<&F::y_zero>("y_zero"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<MultiplyFields> {
    static constexpr auto fields() {
        using F = MultiplyFields;
        return std::tuple{
            required<&F::y>("y"),           required<&F::a>("a"),           required<&F::b>("b"),
            required<&F::mult>("mult"),     required<&F::shift>("shift"),   optional<&F::a_zero>("a_zero"),
            optional<&F::b_zero>("b_zero"), optional<&F::y_zero>("y_zero"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<RotaryFields> {
    static constexpr auto fields() {
        using F = RotaryFields;
        return std::tuple{
            required<&F::y>("y"),           required<&F::x>("x"),         required<&F::partner>("partner"),
            required<&F::mult>("mult"),     required<&F::shift>("shift"), optional<&F::zero>("zero"),
            optional<&F::y_zero>("y_zero"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<DepthwiseFields> {
    static constexpr auto fields() {
        using F = DepthwiseFields;
        return std::tuple{required<&F::y>("y"),       required<&F::x>("x"),           required<&F::index>("index"),
                          optional<&F::fill>("fill"), optional<&F::y_zero>("y_zero"), optional<&F::bits>("bits")};
    }
};

template <>
struct Description<MaxFields> {
    static constexpr auto fields() {
        using F = MaxFields;
        return std::tuple{required<&F::y>("y"), required<&F::x>("x")};
    }
};

namespace {

constexpr const char* TAG_FIELD = "op";

// Reads the op into the alternative of the variant that has this tag; returns false if there is none.
template <std::size_t I = 0>
bool read_tagged(std::string_view tag, Json json, const Where& where, OpFields& out) {
    if constexpr (I == std::variant_size_v<OpFields>) {
        return false;
    } else {
        using Fields = std::variant_alternative_t<I, OpFields>;
        if (tag != Fields::TAG) return read_tagged<I + 1>(tag, json, where, out);
        read_object(json, where, fields_of<Fields>(), &out.emplace<I>(), TAG_FIELD);
        return true;
    }
}

// Append default values as JSON. The default of a zero point is one number.
void append_value(std::string& out, std::int64_t value) { out += std::to_string(value); }
void append_value(std::string& out, bool value) { out += value ? "true" : "false"; }
void append_value(std::string& out, LinearOut value) {
    ((out += '"') += Names<LinearOut>::names[static_cast<std::size_t>(value)]) += '"';
}
void append_value(std::string& out, const Zero& zero) { append_value(out, zero.values.front()); }
void append_value(std::string& out, const std::vector<std::int64_t>& values) {
    out += values.empty() ? "[]" : "not empty";
}
template <class T>
void append_value(std::string& out, const std::optional<T>& value) {
    out += value.has_value() ? "not null" : "null";
}

// Appends a string and then a colon, after a comma if this is not the first member of an object.
void append_key(std::string& out, const char* name) {
    if (out.back() != '{') out += ", ";
    ((out += '"') += name) += "\": ";
}

// Appends a field, up to its default value.
void append_field(std::string& out, const char* name, bool required) {
    append_key(out, name);
    out += required ? "{\"required\": true" : "{\"required\": false";
}

template <class T>
void append_fields(std::string& out, const char* tag) {
    append_key(out, tag);
    out += '{';
    const T defaults{};
    const auto add = [&](const auto& field) {
        using Member = std::remove_cvref_t<decltype(defaults.*(field.MEMBER))>;
        append_field(out, field.name, field.required);
        if constexpr (requires(const Member& value) { append_value(out, value); }) {
            if (!field.required) {
                append_key(out, "default");
                append_value(out, defaults.*(field.MEMBER));
            }
        }
        out += '}';
    };
    static constexpr auto FIELDS = Description<T>::fields();
    std::apply([&](const auto&... fields) { (add(fields), ...); }, FIELDS);
    out += '}';
}

template <std::size_t... I>
std::string list_alternatives(std::index_sequence<I...>) {
    std::string out = "{";
    append_fields<TermFields>(out, "term");
    (append_fields<std::variant_alternative_t<I, OpFields>>(out, std::variant_alternative_t<I, OpFields>::TAG), ...);
    return out + "}";
}

}  // namespace

std::string list_op_fields() { return list_alternatives(std::make_index_sequence<std::variant_size_v<OpFields>>()); }

void read_field(Json json, const Where& where, const Bounds&, OpFields& out) {
    require_type(where, json, Json::object);
    std::optional<std::string> tag;
    json.for_each_member([&](std::string_view name, Json value) {
        if (name != TAG_FIELD) return;
        const Where here{&where, TAG_FIELD};
        require_type(here, value, Json::text);
        if (tag.has_value() && *tag != value.as_text()) fail_at(here, "given twice, with different values");
        tag = value.as_text();
    });
    if (!tag.has_value()) fail_at(where, "missing field 'op'");
    if (!read_tagged(*tag, json, where, out)) {
        fail_at(Where{&where, TAG_FIELD}, "unknown value '" + *tag + "'");
    }
}

}  // namespace fqvit
