#include "tf_ops/cuda/check/report.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace hvd_ctr {
namespace {

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) quoted += c;
  }
  return quoted + "\"";
}

template <typename List, typename Function>
std::string Joined(const List& list, const char* separator, const Function& text_of) {
  std::string text;
  for (const auto& item : list) text += (text.empty() ? "" : separator) + text_of(item);
  return text;
}

std::string TableAsJson(const Table& table) {
  const auto cell = [](const Cell& c) { return c.is_number ? c.text : Quoted(c.text); };
  const auto row = [&](const std::vector<Cell>& cells) { return "[" + Joined(cells, ", ", cell) + "]"; };
  return "{\"title\": " + Quoted(table.title) + ", \"columns\": [" + Joined(table.columns, ", ", Quoted) + "], \"rows\": [" +
         Joined(table.rows, ",\n  ", row) + "]}";
}

}  // namespace

Cell::Cell(double value, int digits) : is_number(true) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), "%.*f", digits, value);
  text = buffer;
}

std::string AsMarkdown(const Report& report) {
  std::string text;
  for (const auto& [name, value] : report.facts) text += "* " + name + ": " + value + "\n";
  const auto same = [](const std::string& name) { return name; };
  for (const Table& table : report.tables) {
    text += "\n" + table.title + "\n\n| " + Joined(table.columns, " | ", same) + " |\n|";
    for (size_t i = 0; i < table.columns.size(); ++i) text += " --- |";
    text += "\n";
    for (const std::vector<Cell>& row : table.rows) {
      text += "| " + Joined(row, " | ", [](const Cell& c) { return c.text; }) + " |\n";
    }
  }
  if (!report.goals.empty()) text += "\n";
  for (const std::string& goal : report.goals) text += "* " + goal + "\n";
  return text;
}

std::string AsJson(const Report& report) {
  const auto fact = [](const std::pair<std::string, std::string>& f) { return Quoted(f.first) + ": " + Quoted(f.second); };
  return "{\"facts\": {" + Joined(report.facts, ", ", fact) + "},\n \"tables\": [" + Joined(report.tables, ",\n ", TableAsJson) +
         "],\n \"goals\": [" + Joined(report.goals, ", ", Quoted) + "]}\n";
}

Status WriteText(const std::string& path, const std::string& text) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  bool ok = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) ok = std::fclose(file) == 0 && ok;
  if (ok) return Status::Ok();
  return MakeStatus(StatusCode::kInternal, "cannot write ", path, ": ", std::strerror(errno));
}

}  // namespace hvd_ctr
