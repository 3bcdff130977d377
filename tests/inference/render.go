// Renders chat templates as Ollama does: text/template with its data and its function "json".
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"text/template"
)

type Arguments map[string]any

type ToolCall struct {
	Function struct {
		Name      string    `json:"name"`
		Arguments Arguments `json:"arguments"`
	} `json:"function"`
}

type Message struct {
	Role      string     `json:"role"`
	Content   string     `json:"content"`
	Thinking  string     `json:"thinking"`
	ToolCalls []ToolCall `json:"tool_calls"`
}

type Case struct {
	Template string    `json:"template"`
	Messages []Message `json:"messages"`
	Tools    []any     `json:"tools"`
}

func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil {
		panic(err)
	}
	functions := template.FuncMap{"json": func(value any) string {
		text, _ := json.Marshal(value)
		return string(text)
	}}
	texts := []string{}
	for _, each := range cases {
		parsed, err := template.New("").Option("missingkey=zero").Funcs(functions).Parse(each.Template)
		if err != nil {
			panic(err)
		}
		var text bytes.Buffer
		data := map[string]any{"Messages": each.Messages, "Tools": each.Tools, "Response": ""}
		if err := parsed.Execute(&text, data); err != nil {
			panic(err)
		}
		texts = append(texts, text.String())
	}
	output, _ := json.Marshal(texts)
	fmt.Println(string(output))
}
