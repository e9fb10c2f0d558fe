#include "core/value.h"

namespace fqvit {

std::string MessagePart::str() const {
    if (kind_ == TEXT) return text_;
    if (kind_ == NUMBER) return std::to_string(number_);
    std::string text = "[";
    for (const std::int64_t size : *shape_) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
    return text + "]";
}

void fail(std::initializer_list<MessagePart> parts) {
    std::string message;
    for (const MessagePart& part : parts) message += part.str();
    throw BadProgram(message);
}

}  // namespace fqvit
